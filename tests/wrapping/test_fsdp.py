"""Fully sharded models: their backward has collectives, so that one rank's dead microbatch runs live, and says why."""

from __future__ import annotations

import torch

from tests.wrapping.ranks import run_ranks
from tests.wrapping.sharded import work


def test_keeps_fully_sharded_models_live():
    for unpruned, pruned in run_ranks(2, work, ("dld", "ddl")):
        decisions = pruned.pop("decisions")
        assert unpruned.keys() == pruned.keys()
        for name, value in unpruned.items():
            same = torch.equal(value, pruned[name]) if isinstance(value, torch.Tensor) else value == pruned[name]
            assert same, f"{name} differs"
        assert all(" live " in decision for decision in decisions)
        assert sum("fully sharded" in decision for decision in decisions) == 2
