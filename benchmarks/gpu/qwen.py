"""Qwen3-4B's shape under Megatron-Core and under transformers, with random weights, and a GRPO step for each."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

#: Asked before a CPU pretends to be one.
HAS_GPU = torch.cuda.is_available()

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A decoder: Qwen3-4B by default. `layers` and the rest can be cut for tests on a CPU."""

    layers: int = 36
    hidden: int = 2560
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 9728
    vocabulary: int = 151936


TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocabulary=96)


def grpo_loss(batch: Batch, minus_logps: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped policy gradient; minus_logps [R, T] are minus the log-probs of the labels."""
    logps = -minus_logps.float()
    ratio = torch.exp(logps - batch["old_logps"])
    advantages = batch["advantages"][:, None]
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    mask = batch["loss_mask"]
    loss = -(surrogate * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"loss": loss.detach().clone()}


def make_batches(count: int, tokens: int, dead: set[int], vocabulary: int, device: str, rows: int = 1) -> list[Batch]:
    """`count` microbatches of `rows` times `tokens` tokens, those in `dead` with advantages of zero."""
    batches = []
    for index in range(count):
        gen = torch.Generator().manual_seed(index)
        ids = torch.randint(0, vocabulary, (rows, tokens + 1), generator=gen)
        advantages = torch.zeros(rows) if index in dead else torch.randn(rows, generator=gen)
        batch = {
            "tokens": ids[:, :-1].contiguous(),
            "labels": ids[:, 1:].contiguous(),
            "old_logps": torch.full((rows, tokens), -math.log(vocabulary)),
            "advantages": advantages,
            "loss_mask": torch.ones(rows, tokens),
        }
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


# Megatron-Core ------------------------------------------------------------------------------------------------------


def start_megatron(tensor: int = 1, pipeline: int = 1) -> None:
    """One process group, from the launcher's environment or for this process alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if HAS_GPU else "gloo")
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model_parallel_cuda_manual_seed(1)


def megatron_model(shape: Shape, dtype: torch.dtype, recompute: bool, ddp: dict[str, Any] | None = None, **config: Any):
    """A GPTModel in Megatron's DDP, its core attention replaced by torch's scaled_dot_product_attention."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "use_cpu_initialization": not HAS_GPU,
    }
    if recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    made = TransformerConfig(**options | config)
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = sdpa_attention()
    torch.manual_seed(1)
    model = GPTModel(
        made,
        spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=1 << 16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    if HAS_GPU:
        model.cuda()
    if dtype is torch.bfloat16:
        model = Float16Module(made, model)
    ddp_config = DistributedDataParallelConfig(
        **{"overlap_grad_reduce": False, "grad_reduce_in_fp32": False, **(ddp or {})}
    )
    wrapped = DistributedDataParallel(config=made, ddp_config=ddp_config, module=model)
    made.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        made.no_sync_func = wrapped.no_sync
    return wrapped, made


def sdpa_attention() -> type:
    """A core attention for the local layer spec, [T, R, heads, dim] causal."""
    from megatron.core.transformer.module import MegatronModule

    class SdpaAttention(MegatronModule):
        def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
            super().__init__(config=config)
            self._scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=query.shape[1] != key.shape[1]
            )
            return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)

    return SdpaAttention


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(data_iterator)
    positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device).expand_as(batch["tokens"])
    output = model(batch["tokens"], positions, None, labels=batch["labels"])
    return output, partial(grpo_loss, batch)


def run_megatron(step: Any, batches: Any, count: int, model: Any, *, forward_only: bool = False) -> list[Any]:
    """Forward and backward of `count` microbatches through Megatron's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )


# transformers -------------------------------------------------------------------------------------------------------


def hugging_face_model(shape: Shape, dtype: torch.dtype, recompute: bool, device: str) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def hugging_face_step(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(input_ids=batch["tokens"]).logits
    logps = -F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="none")
    return grpo_loss(batch, -logps.view_as(batch["old_logps"]))
