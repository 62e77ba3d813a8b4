"""Side conditions on values of every type, against what they say element by element."""

from __future__ import annotations

import math

import pytest
import torch

from gradprune.facts import BOUND, Condition
from gradprune.runtime.checks import failure

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
VALUES = [[1.0, -2.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, 0.0], [-(2.0**61)], [2.0**60, 0.0], [3e4], []]
SAYS = {
    "finite": lambda x: math.isfinite(x),
    "bounded": lambda x: abs(x) <= BOUND,
    "notnan": lambda x: not math.isnan(x),
    "nonzero": lambda x: x != 0,
}


@pytest.mark.parametrize("kind", SAYS)
@pytest.mark.parametrize("dtype", REAL)
def test_condition_fails_if_an_element_does(kind, dtype):
    for numbers in VALUES:
        value = torch.tensor(numbers, dtype=torch.float64).to(dtype)
        holds = all(SAYS[kind](float(x)) for x in value)
        assert (failure(_condition(kind), value) == 0) == holds, numbers


@pytest.mark.parametrize("number, holds", [(0, True), (2**60, True), (-(2**62), False), (-(2**63), False)])
def test_bound_of_integers(number, holds):
    assert (failure(_condition("bounded"), torch.tensor([1, number])) == 0) == holds


def test_bound_of_complex_numbers():
    assert failure(_condition("bounded"), torch.tensor([1 + 1j])) == 0
    assert failure(_condition("bounded"), torch.tensor([1 + 2.0**61 * 1j])) != 0


def _condition(kind: str) -> Condition:
    return Condition(kind, "value")  # type: ignore[arg-type]
