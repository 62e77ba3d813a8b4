"""What activation memory may be: bad numbers are named."""

import math

import pytest

from gradprune.errors import PlanError
from gradprune.memory import ActivationMemory
from gradprune.planner import StepPlan


@pytest.mark.parametrize(
    ("name", "value"), [("layers", math.nan), ("hidden", math.inf), ("vocabulary", 1.5), ("layers", "2")]
)
def test_refuses_sizes_of_no_model(name, value):
    with pytest.raises(PlanError, match=f"{name} is {value!r}: pass a whole number"):
        ActivationMemory.of_transformer(**{"layers": 2, "hidden": 8, "vocabulary": 8, name: value})


@pytest.mark.parametrize(
    ("live", "dead", "name"), [(0, 1, "live"), (1, 0, "dead"), (math.nan, 1, "live"), (1, -1, "dead")]
)
def test_refuses_bytes_that_nothing_takes(live, dead, name):
    with pytest.raises(PlanError, match=f"{name} is"):
        ActivationMemory(live, dead)


def test_a_bad_budget_is_named_before_it_is_scaled():
    with pytest.raises(PlanError, match="token_budget is nan"):
        StepPlan.build([1], [0.0], token_budget=math.nan, ranks=1, memory=ActivationMemory(2, 1))  # type: ignore[arg-type]
