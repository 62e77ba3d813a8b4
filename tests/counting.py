"""Counting in tests: torch's own counter, one microbatch on a meter, gradients compared bit by bit."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from gradprune.counting.rules import EXTRA_FORMULAS


def torch_counts(forward) -> tuple[int, int]:
    """FLOPs of forward and backward (recomputation included) by torch's counter."""
    with FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS) as ahead:
        loss = forward()
    with FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS) as back:
        loss.backward()
    return ahead.get_total_flops(), back.get_total_flops()


def count_live(meter, key, forward, tokens=0) -> torch.Tensor:
    with meter.counting_forward(key):
        loss = forward()
    loss = meter.count_backward(key, loss)
    meter.live(key, tokens)
    return loss


def count_dead(meter, key, forward, tokens=0) -> None:
    with meter.counting_forward(key, dead=True), torch.no_grad():
        forward()
    meter.dead(key, tokens)


def gradients(module) -> list[torch.Tensor | None]:
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    return found


def assert_same(first, second) -> None:
    assert len(first) == len(second) > 0
    for a, b in zip(first, second):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
