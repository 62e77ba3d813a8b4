"""Small Megatron models in every parallel layout, their data, and a GRPO step as a user of megatron-core writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.megatron.attention import plain_attention_spec, positions

VOCABULARY, LENGTH, ROWS, MICROBATCHES = 32, 16, 2, 4
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """One way to lay a model out over ranks.

    config, ddp: fields of TransformerConfig and DistributedDataParallelConfig.
    dtype: of the parameters; half-precision ones are trained as trainers do, with a master copy and gradients in fp32.
    loss_scale: with which fp16 begins.
    per_token: the loss returns its sum and its number of tokens. packed: rows are one THD sequence. frozen: only the
    MLPs are trained. hybrid: a HybridModel instead of a GPTModel.
    """

    name: str
    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    per_token: bool = False
    packed: bool = False
    tied: bool = True
    frozen: bool = False
    hybrid: bool = False
    dtype: torch.dtype = torch.float32
    loss_scale: float = 2.0**12

    @property
    def data_ranks(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)


@dataclass
class Trainee:
    """What a training loop holds on one rank."""

    chunks: list[Any]
    config: TransformerConfig
    optimizer: Any


def build(layout: Layout, seed: int = 1234) -> Trainee:
    """Parallel state, model chunks in DDP, and Megatron's optimizer; the same on every call."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        distributed_timeout_minutes=1,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = build_config(layout)
    half = layout.dtype is not torch.float32
    ddp_config = DistributedDataParallelConfig(**{"bucket_size": 4000, "grad_reduce_in_fp32": half, **layout.ddp})
    modules = [_module(layout, config, stage) for stage in range(layout.vpp or 1)]
    chunks: list[Any] = [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if layout.vpp else chunks[0].no_sync
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=1.0,
        bf16=layout.dtype is torch.bfloat16,
        fp16=layout.dtype is torch.float16,
        initial_loss_scale=layout.loss_scale,
        params_dtype=layout.dtype,
        use_distributed_optimizer=ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(chunks, config, optimizer)


def build_config(layout: Layout) -> TransformerConfig:
    fields = {
        "num_layers": 4 if layout.vpp else 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "params_dtype": layout.dtype,
        "pipeline_dtype": layout.dtype,
        "bf16": layout.dtype is torch.bfloat16,
        "fp16": layout.dtype is torch.float16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "calculate_per_token_loss": layout.per_token,
    }
    if layout.vpp:
        # Over gloo, prev and next rank of a pipeline of two are one peer, which batched p2p mixes up.
        fields |= {"batch_p2p_comm": False, "overlap_p2p_comm": True}
    return TransformerConfig(**{**fields, **layout.config})


def _module(layout: Layout, config: TransformerConfig, virtual_stage: int) -> torch.nn.Module:
    stage = {"ignore_virtual": False, "vp_stage": virtual_stage} if layout.vpp else {}
    fields = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": LENGTH * layout.cp,
        "pre_process": parallel_state.is_pipeline_first_stage(**stage),
        "post_process": parallel_state.is_pipeline_last_stage(**stage),
        "share_embeddings_and_output_weights": layout.tied,
        "position_embedding_type": "rope",
    }
    if layout.vpp:
        fields["vp_stage"] = virtual_stage
    if layout.hybrid:
        from tests.megatron.hybrid import hybrid_model  # older versions have none

        model = hybrid_model(config, **fields)
    else:
        model = GPTModel(config, plain_attention_spec(config), **fields)
    if layout.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
    model.to(device())
    return Float16Module(config, model) if layout.dtype is not torch.float32 else model


def device() -> str:
    """Where this process trains: on its GPU, if it has one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_batches(seed: int, dead: set[int]) -> list[Batch]:
    """MICROBATCHES microbatches of ROWS sequences where this process trains; those of `dead` have no advantages."""
    batches = []
    for index in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        advantages = torch.randn(ROWS, generator=generator)
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "advantages": torch.zeros(ROWS) if index in dead else advantages,
            "old_logps": -3.5 + 0.1 * torch.randn(ROWS, LENGTH, generator=generator),
            "loss_mask": (torch.rand(ROWS, LENGTH, generator=generator) > 0.3).float(),
        }
        batches.append({name: tensor.to(device()) for name, tensor in batch.items()})
    return batches


def make_forward_step(layout: Layout, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The user's forward_step; context-parallel ranks cut their part out of the whole batch in it."""
    chosen = loss or (token_loss if layout.per_token else mean_loss)

    def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(data_iterator)
        rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        place = positions([LENGTH], rank, size)[1].to(device())
        part = {name: tensor[:, place] if tensor.dim() == 2 else tensor for name, tensor in batch.items()}
        rows, width = part["tokens"].shape
        where = place.expand(rows, width)
        if not layout.packed:
            return model(part["tokens"], where, None, labels=part["labels"]), partial(chosen, part)
        flat = {name: tensor.reshape(1, -1) for name, tensor in part.items()}
        ends = torch.arange(0, rows * LENGTH + 1, LENGTH, dtype=torch.int32, device=device())
        packing = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH
        )
        output = model(flat["tokens"], where.reshape(1, -1), None, labels=flat["labels"], packed_seq_params=packing)
        return output, partial(chosen, part)

    return forward_step


def _surrogate(batch: Batch, output: torch.Tensor) -> torch.Tensor:
    logps = -output.float().reshape(batch["old_logps"].shape)
    ratio = torch.exp(logps - batch["old_logps"])
    advantages = batch["advantages"][:, None]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * batch["loss_mask"]


def mean_loss(batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = _surrogate(batch, output).sum() / batch["loss_mask"].sum()
    return loss, {"loss": loss.detach().clone()}


def token_loss(batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = _surrogate(batch, output).sum()
    return loss, batch["loss_mask"].sum().int(), {"loss": loss.detach().clone()}
