"""Sound and complete on the losses of eight released trainers, judged by gradients measured here and now.

By default a sample of them; ``-m slow`` runs them all.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers import expected, survey, wheels
from tests.peers.loaders import TRAINERS

pytestmark = pytest.mark.peers
LINES = {name: line for name, line in expected.load().items() if not expected.is_variant(name)}
TRUTH = {"adv": "zero_microbatch", "adv * mask": "zero_product"}


@pytest.fixture(scope="module", params=["sample", pytest.param("all", marks=pytest.mark.slow)])
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    try:
        wheels.roots()
    except wheels.NoRegistry as error:
        pytest.skip(f"no package registry, and the trainers' wheels are not in {wheels.cache_folder()}: {error}")
    names = expected.sample(LINES, 16) if request.param == "sample" else list(expected.ALL)
    found = {row["name"]: row for row in survey.run([name for name in names if name.split("/")[0] in TRAINERS])}
    assert set(found) == (set(names) if request.param == "sample" else set(LINES))
    return found


def test_says_what_is_committed(rows: dict[str, Any]) -> None:
    assert {name: expected.summary(row) for name, row in rows.items()} == {name: LINES[name] for name in rows}


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
@pytest.mark.parametrize("place", ["none", "valid", "masked"])
def test_conditions_break_exactly_where_the_gradient_does(rows: dict[str, Any], zero: str, place: str) -> None:
    """With no overflow, or an infinite ratio at a valid or a masked token: a broken condition, or exact zeros."""
    assert survey.inexact(rows.values(), zero, place) == {}


def test_conditions_watch_every_loss_that_turns_nan(rows: dict[str, Any]) -> None:
    nan = [name for name, row in rows.items() if row["truth"]["nan_on_overflow"]]
    assert nan
    for name in nan:
        if rows[name]["verdicts"]["adv"]["proved"]:
            assert any(item["kind"] == "finite" for item in rows[name]["verdicts"]["adv"]["conditions"]), name
            assert rows[name]["overflow"]["adv"]["valid"]["broken"], name


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
def test_proves_only_what_is_zero(zero: str) -> None:
    proved = {name for name, line in LINES.items() if line[zero]["proved"]}
    assert proved <= {name for name, line in LINES.items() if TRUTH[zero] in line["truth"]}


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
def test_proves_by_row_only_rows_that_stand_alone(zero: str) -> None:
    by_row = {name for name, line in LINES.items() if line[zero].get("per_row")}
    zeros = {name for name, line in LINES.items() if "zero_off_policy" in line["truth"]}
    assert by_row
    assert by_row <= {name for name in zeros if "rows_coupled" not in LINES[name]["truth"]}


@pytest.mark.parametrize(("zero", "provable", "least"), [("adv", 55, 53), ("adv * mask", 33, 32)])
def test_proves_what_is_zero(zero: str, provable: int, least: int) -> None:
    zeros = [name for name, line in LINES.items() if TRUTH[zero] in line["truth"]]
    assert len(LINES) == 65
    assert len(zeros) == provable
    assert sum(LINES[name][zero]["proved"] for name in zeros) >= least


def test_knows_the_losses_that_turn_nan() -> None:
    assert sum("nan_on_overflow" in line["truth"] for line in LINES.values()) == 22
