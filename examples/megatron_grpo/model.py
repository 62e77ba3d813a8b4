"""A small Megatron GPT on one CPU process; parallel state, model, DDP and optimizer are megatron-core's own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from task import ANSWER, PROMPT, VOCABULARY


def start_megatron(seed: int) -> None:
    """A world of one process, and every random stream seeded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=1)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def stop_megatron() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build_model(hidden: int, layers: int) -> tuple[DistributedDataParallel, TransformerConfig]:
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=PROMPT + ANSWER,
        position_embedding_type="learned_absolute",
    )
    model = DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=False), module=gpt
    )
    config.finalize_model_grads_func = finalize_model_grads
    return model, config


def build_optimizer(model: DistributedDataParallel, learning_rate: float) -> MegatronOptimizer:
    config = OptimizerConfig(optimizer="adam", lr=learning_rate, weight_decay=0.01, adam_beta2=0.95, clip_grad=1.0)
    return get_megatron_optimizer(config, [model])


def set_learning_rate(optimizer: MegatronOptimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def causal_inputs(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [R, T] of tokens [R, T], and the mask [1, 1, T, T] that is True where attention may not look."""
    rows, width = tokens.shape
    positions = torch.arange(width).expand(rows, width)
    return positions, torch.ones(1, 1, width, width, dtype=torch.bool).triu(diagonal=1)
