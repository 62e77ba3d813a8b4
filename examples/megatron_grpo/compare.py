"""Two arms of one update, from the same state on the same rollout, compared bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from grpo import run_schedule
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from rollout import Batch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Arm:
    """What an update left behind, by name: gradients before the optimizer's step, everything else after it."""

    tensors: Tensors
    metrics: list[Tensors]
    seconds: float


def read_state(model: DistributedDataParallel, optimizer: MegatronOptimizer) -> Tensors:
    """The live tensors that an update reads and changes: parameters, buffers and the optimizer's state."""
    state = {f"model {name}": value for name, value in [*model.named_parameters(), *model.named_buffers()]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.optimizer.state[parameter].items():
                state[f"optimizer {key} of {names[id(parameter)]}"] = value
    return state


def copy_state(state: Tensors) -> Tensors:
    return {"random state": torch.get_rng_state()} | {name: value.detach().clone() for name, value in state.items()}


@torch.no_grad()
def restore_state(state: Tensors, saved: Tensors) -> None:
    torch.set_rng_state(saved["random state"])
    for name, value in state.items():
        value.copy_(saved[name])


def run_arm(
    step: Any, batches: Iterator[Batch], count: int, model: DistributedDataParallel, optimizer: MegatronOptimizer
) -> Arm:
    """One update with `step`; the model and the optimizer are left in the state that it leads to."""
    start = time.perf_counter()
    metrics = run_schedule(step, batches, count, model, optimizer)
    schedule_seconds = time.perf_counter() - start
    gradients = {f"main_grad {name}": value.main_grad.clone() for name, value in model.named_parameters()}
    start = time.perf_counter()
    succeeded, gradient_norm, _ = optimizer.step()
    seconds = schedule_seconds + time.perf_counter() - start
    outcome = {"update succeeded": torch.tensor(succeeded), "gradient norm": torch.tensor(gradient_norm)}
    return Arm(gradients | outcome | copy_state(read_state(model, optimizer)), metrics, seconds)


def differences(first: Arm, second: Arm) -> list[str]:
    """The name of every tensor and metric in which the arms are not `torch.equal`; empty if there is none."""
    left, right = _flatten(first), _flatten(second)
    return [
        name
        for name in sorted(left.keys() | right.keys())
        if name not in left or name not in right or not torch.equal(left[name], right[name])
    ]


def _flatten(arm: Arm) -> Tensors:
    metrics = {
        f"{key} of microbatch {index}": value for index, row in enumerate(arm.metrics) for key, value in row.items()
    }
    return arm.tensors | metrics
