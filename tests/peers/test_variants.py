"""Sound on losses of our own with the habits of trainers nobody has loaded; complete but for a list.

By default a sample of them; ``-m slow`` runs them all.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers import expected, survey
from tests.peers.variants import FAMILIES

LINES = {name: line for name, line in expected.load().items() if expected.is_variant(name)}
TRUTH = {"adv": "zero_microbatch", "adv * mask": "zero_product"}
# Provable with the product, and refused: a line of one tensor is cut by the sizes of another, tokens are put together
# from pieces that lay apart, positions of a mask are read in place of it, sums over positions are matrix products.
MISSED = (
    "machinery/in_chunks",
    "packed/loop_over_lengths",
    "packed/segment_matrix",
    "packed/shards_of_tokens",
    "packed/split_four_tensors",
    "packed/valid_positions_only",
    "policies/by_einsum",
    "sequences/segments_by_slice",
)
# The conditions of a proof are those of all its paths: here the one of the path that was not taken breaks.
OTHER_PATH = {"coupled/branch_on_all_rows"}


@pytest.fixture(scope="module", params=["sample", pytest.param("all", marks=pytest.mark.slow)])
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    names = expected.sample(LINES, 16) if request.param == "sample" else list(expected.ALL)
    found = {row["name"]: row for row in survey.run([name for name in names if name.split("/")[0] in FAMILIES])}
    assert set(found) == (set(names) if request.param == "sample" else set(LINES))
    return found


def test_says_what_is_committed(rows: dict[str, Any]) -> None:
    assert {name: expected.summary(row) for name, row in rows.items()} == {name: LINES[name] for name in rows}


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
@pytest.mark.parametrize("place", ["none", "valid", "masked"])
def test_conditions_break_exactly_where_the_gradient_does(rows: dict[str, Any], zero: str, place: str) -> None:
    assert set(survey.inexact(rows.values(), zero, place)) <= OTHER_PATH


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
def test_proves_only_what_is_zero(zero: str) -> None:
    proved = {name for name, line in LINES.items() if line[zero]["proved"]}
    assert proved <= {name for name, line in LINES.items() if TRUTH[zero] in line["truth"]}
    by_row = {name for name in proved if LINES[name][zero]["per_row"]}
    zeros = {name for name, line in LINES.items() if "zero_off_policy" in line["truth"]}
    assert by_row <= {name for name in zeros if "rows_coupled" not in LINES[name]["truth"]}


@pytest.mark.parametrize("zero", survey.HYPOTHESES)
def test_proves_what_is_zero_but_for_a_list(zero: str) -> None:
    missed = {name for name, line in LINES.items() if TRUTH[zero] in line["truth"] and not line[zero]["proved"]}
    assert missed == (set(MISSED) if zero == "adv * mask" else set())
