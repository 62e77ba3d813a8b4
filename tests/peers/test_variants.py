"""Sound on seventy losses of our own that have the habits of trainers nobody has loaded; complete but for a list."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers import expected, survey

LINES = {name: line for name, line in expected.load().items() if expected.is_variant(name)}
TRUTH = {"adv": "zero_microbatch", "adv * mask": "zero_product"}


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return {row["name"]: row for row in survey.run(expected.VARIANT_SHARES)}


@pytest.mark.parametrize("name", LINES)
def test_verdicts_are_the_committed_ones(rows: dict[str, Any], name: str) -> None:
    assert expected.summary(rows[name]) == LINES[name]


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
def test_proves_only_what_is_zero(rows: dict[str, Any], zero: str) -> None:
    proved = {name for name, row in rows.items() if row["verdicts"][zero]["proved"]}
    assert proved <= {name for name, row in rows.items() if row["truth"][TRUTH[zero]]}
    per_row = {name for name, row in rows.items() if row["verdicts"][zero].get("per_row")}
    assert per_row <= {name for name, row in rows.items() if row["truth"]["zero_off_policy"]}
    assert not any(rows[name]["truth"]["rows_coupled"] for name in per_row)


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
@pytest.mark.parametrize("place", ["none", "valid", "masked"])
def test_conditions_break_exactly_where_the_gradient_does(rows: dict[str, Any], zero: str, place: str) -> None:
    wrong = {}
    for name, row in rows.items():
        case = (row["overflow"][zero] or {}).get(place)
        if case is not None and case["zero"] != (not case["broken"]):
            wrong[name] = case
    assert not wrong
