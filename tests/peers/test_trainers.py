"""Sound and complete on the losses of eight released trainers, judged by gradients measured here and now."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers import expected, survey, wheels

pytestmark = pytest.mark.peers
LINES = {name: line for name, line in expected.load().items() if not expected.is_variant(name)}
TRUTH = {"adv": "zero_microbatch", "adv * mask": "zero_product"}


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    try:
        wheels.roots()
    except wheels.NoRegistry as error:
        pytest.skip(f"no package registry, and the trainers' wheels are not in {wheels.cache_folder()}: {error}")
    return {row["name"]: row for row in survey.run(expected.TRAINER_SHARES)}


def test_every_pinned_trainer_is_there(rows: dict[str, Any]) -> None:
    assert set(rows) == set(LINES)
    assert len(rows) == 65


@pytest.mark.parametrize("name", LINES)
def test_verdicts_are_the_committed_ones(rows: dict[str, Any], name: str) -> None:
    assert expected.summary(rows[name]) == LINES[name]


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
def test_proves_only_what_is_zero(rows: dict[str, Any], zero: str) -> None:
    proved = {name for name, row in rows.items() if row["verdicts"][zero]["proved"]}
    assert proved <= {name for name, row in rows.items() if row["truth"][TRUTH[zero]]}


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
def test_proves_per_row_only_rows_that_stand_alone(rows: dict[str, Any], zero: str) -> None:
    per_row = {name for name, row in rows.items() if row["verdicts"][zero].get("per_row")}
    alone = {name for name, row in rows.items() if row["truth"]["zero_off_policy"] and not row["truth"]["rows_coupled"]}
    assert per_row
    assert per_row <= alone


@pytest.mark.parametrize(("zero", "provable", "least"), [("adv", 55, 53), ("adv * mask", 33, 32)])
def test_proves_what_is_zero(rows: dict[str, Any], zero: str, provable: int, least: int) -> None:
    zeros = [name for name, row in rows.items() if row["truth"][TRUTH[zero]]]
    assert len(zeros) == provable
    assert sum(rows[name]["verdicts"][zero]["proved"] for name in zeros) >= least


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
@pytest.mark.parametrize("place", ["none", "valid", "masked"])
def test_conditions_break_exactly_where_the_gradient_does(rows: dict[str, Any], zero: str, place: str) -> None:
    """A run that breaks no condition has zero gradients; one that has zero gradients breaks none."""
    wrong = {}
    for name, row in rows.items():
        case = (row["overflow"][zero] or {}).get(place)
        if case is not None and case["zero"] != (not case["broken"]):
            wrong[name] = case
    assert not wrong


def test_conditions_watch_every_loss_that_turns_nan(rows: dict[str, Any]) -> None:
    nan = [name for name, row in rows.items() if row["truth"]["nan_on_overflow"]]
    assert len(nan) == 22
    proved = [name for name in nan if rows[name]["verdicts"]["adv"]["proved"]]
    assert proved
    for name in proved:
        assert any(item["kind"] == "finite" for item in rows[name]["verdicts"]["adv"]["conditions"]), name
        assert rows[name]["overflow"]["adv"]["valid"]["broken"], name
