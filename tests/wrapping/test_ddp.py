"""DistributedDataParallel on real gloo processes: gradients, buffers and collective counts are the unpruned ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.wrapping.ranks import run_ranks
from tests.wrapping.replicated import CASES, work

#: What each rank decided: the first microbatch whose backward is reduced runs live, dead or not.
EXPECTED = {
    "last dead on one rank": ("dl ld ll", "dl ll ld"),
    "last dead on all ranks": ("dl ld dd", "ll ld dd"),
    "one rank has nothing live": ("dl dd dd", "ll ll ll"),
    "every backward reduced": ("ll dd ld", "ld dd dl"),
    "unused and reduced every time": ("ld ld", "ld dd"),
    "static graph": ("ll ld dd", "ll ld dd"),
    "static graph, reentrant checkpoint": ("ll ll dd", "ll ll dd"),
    "another program than proved": ("dl dl dd", "dl dd dd"),
}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, work, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_unpruned(results, name):
    for rank in range(2):
        unpruned, pruned = results[rank][name]
        for key, value in unpruned.items():
            same = torch.equal(value, pruned[key]) if isinstance(value, torch.Tensor) else value == pruned[key]
            assert same, f"rank {rank}: {key} differs"


@pytest.mark.parametrize("name", CASES)
def test_ranks_prune(results, name):
    for rank, wanted in enumerate(EXPECTED.get(name, CASES[name].dead)):
        decisions = "".join(text.split()[2][0] for text in results[rank][name][1]["decisions"])
        assert decisions == wanted.replace(" ", "")


def test_keeps_first_reduced_backward(results):
    decision = results[0]["one rank has nothing live"][1]["decisions"][1]
    assert "lays out its buckets" in decision


def test_keeps_what_was_not_proved(results):
    decision = results[0]["another program than proved"][1]["decisions"][3]
    assert "something else than what was proved" in decision
