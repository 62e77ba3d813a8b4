"""FLOPs of a step by running it once, leaving the model's gradients as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradprune.counting.tape import Tape, record_backward, record_forward
from gradprune.flops import Phases
from gradprune.trees import loss_of


def count_step(step: Callable[[Any, Any], Any], model: torch.nn.Module, batch: Any) -> Phases:
    """FLOPs of ``step(model, batch)`` and of the backward of its loss.

    Restores ``.grad`` and the CPU's random state. Hooks on parameters fire: give a model that is not wrapped for
    distributed training.
    """
    tape, grads = Tape(), {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in grads:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[]):
            with record_forward(tape):
                loss = loss_of(step(model, batch))
            if loss.requires_grad:
                record_backward(tape, loss)
                loss.backward()
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad
    return tape.measured()
