"""The step as a Megatron user writes it: a forward_step, a loss, and one update through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from model import causal_inputs
from rollout import Batch
from task import ANSWER, PAD, PROMPT, make_prompts, sloppy_answers

CLIP = 0.2
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def grpo_loss(batch: Batch, output_tensor: torch.Tensor) -> Loss:
    """The clipped policy gradient; output_tensor [R, T] is minus the log-prob of each label."""
    logps = -output_tensor.float()
    ratio = torch.exp(logps - batch["old_logps"])
    advantages = batch["advantages"][:, None]
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    mask = batch["loss_mask"]
    loss = -(surrogate * mask).sum() / mask.sum()
    ratio_mean = (ratio.detach() * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone(), "ratio": ratio_mean}


def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Loss]]:
    batch = next(data_iterator)
    output_tensor = model(batch["tokens"], *causal_inputs(batch["tokens"]), labels=batch["labels"])
    return output_tensor, partial(grpo_loss, batch)


def imitation_loss(batch: Batch, output_tensor: torch.Tensor) -> Loss:
    loss = (output_tensor.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    return loss, {"loss": loss.detach().clone()}


def imitation_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Loss]]:
    batch = next(data_iterator)
    output_tensor = model(batch["tokens"], *causal_inputs(batch["tokens"]), labels=batch["labels"])
    return output_tensor, partial(imitation_loss, batch)


def imitation_batch(rows: int, generator: torch.Generator) -> Batch:
    """Prompts with the answers of a sloppy teacher, for the supervised warm-up."""
    prompts = make_prompts(rows, generator)
    tokens = torch.cat([prompts, sloppy_answers(prompts, generator)], dim=1)
    answer = torch.arange(1, PROMPT + ANSWER) >= PROMPT
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": (answer & (tokens[:, 1:] != PAD)).float()}


def run_schedule(
    step: Any, data_iterator: Iterator[Batch], count: int, model: DistributedDataParallel, optimizer: MegatronOptimizer
) -> list[dict[str, torch.Tensor]]:
    """Forward and backward of `count` microbatches; gradients are left in main_grad. Returns each one's metrics."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=count,
        seq_length=PROMPT + ANSWER,
        micro_batch_size=1,
    )
