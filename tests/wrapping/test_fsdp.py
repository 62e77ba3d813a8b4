"""Fully sharded models: a backward is pruned where all ranks have agreed on it, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from gradprune import fully_sharded
from gradprune.errors import PruneError
from tests.wrapping.ranks import run_ranks
from tests.wrapping.sharded import CASES, work


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_unpruned(name):
    expected = CASES[name].outcomes.replace(" ", "")
    for unpruned, pruned in run_ranks(2, work, name):
        decisions, ours, theirs = pruned.pop("decisions"), pruned.pop("collectives"), unpruned.pop("collectives")
        assert unpruned.keys() == pruned.keys()
        for key, value in unpruned.items():
            assert (value is None) == (pruned[key] is None), f"{key}: {pruned[key]} instead of {value}"
            assert value is None or torch.equal(value, pruned[key]), f"{key} differs"
        assert "".join("l" if " live " in decision else "d" for decision in decisions) == expected, decisions
        for letter, mine, unwrapped in zip(expected, ours, theirs):
            whole = letter == "l" or CASES[name].audit
            assert mine == unwrapped if whole and not CASES[name].surprise else mine <= unwrapped or letter == "l"


def test_says_what_to_attach():
    for _, pruned in run_ranks(2, work, "not attached"):
        assert sum("gradprune.fully_sharded.attach" in decision for decision in pruned["decisions"]) == 3


def test_refuses_a_model_that_is_not_sharded():
    with pytest.raises(PruneError, match="fully_shard first"):
        fully_sharded.attach(torch.nn.Linear(2, 2))
