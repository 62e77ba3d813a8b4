"""Side conditions on values of every type, against what they say element by element."""

from __future__ import annotations

import math

import pytest
import torch

from gradprune.facts import BOUND, Condition
from gradprune.runtime.checks import failure

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
VALUES = [[1.0, -2.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, 0.0], [-(2.0**61)], [2.0**60, 0.0], [3e4], []]
ENDS = torch.tensor([-1.0, 1.0])
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


@pytest.mark.parametrize("function", [torch.log_softmax, torch.softmax])
@pytest.mark.parametrize("dtype", REAL)
def test_softmax_is_nan_along_all_of_its_dimension_or_nowhere(function, dtype):
    """What `Condition.along` of a softmax rests on: rows of finite numbers, infinities and NaN, short and long."""
    generator = torch.Generator().manual_seed(0)
    specials = torch.tensor([0.0, 1.0, -3e4, 3e4, math.inf, -math.inf, math.nan, *torch.finfo(dtype).max * ENDS])
    for width in (1, 2, 7, 300):
        weights = torch.rand(2000, len(specials), generator=generator) ** 8
        rows = specials[torch.multinomial(weights, width, replacement=True, generator=generator)].to(dtype)
        nan = function(rows, -1).isnan()
        assert torch.equal(nan.any(-1), nan.all(-1))
        assert 0 < nan.any(-1).sum() < len(rows)


def test_along_looks_at_one_element():
    value = torch.zeros(3, 4)
    value[1, 2] = math.nan
    together = Condition("notnan", "log_softmax", along=-1)
    assert failure(together, value) == 0  # never so of a softmax
    value[1] = math.nan
    assert failure(together, value) != 0
    assert failure(together, torch.zeros(3, 0)) == 0


def _condition(kind: str) -> Condition:
    return Condition(kind, "value")  # type: ignore[arg-type]
