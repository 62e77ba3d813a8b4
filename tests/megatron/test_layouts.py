"""Pruned training equals unpruned training bit for bit, in every parallel layout, and prunes what it should."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.megatron.arms import compare_arms, parse_dead
from tests.megatron.layouts import Layout
from tests.megatron.matrix import CORE, PATTERNS, REST, check


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", CORE, ids=lambda layout: layout.name)
def test_prunes_and_equals(worlds, layout):
    dead = parse_dead(PATTERNS["mixed"])
    check(layout, dead, worlds(layout.world).run(compare_arms, layout, dead))


@pytest.mark.timeout(120)
@pytest.mark.skipif(find_spec("megatron.core.models.hybrid") is None, reason="no HybridModel yet")
@pytest.mark.parametrize("layout", [Layout("hybrid", hybrid=True), Layout("hybrid, PP2", 2, pp=2, hybrid=True)])
def test_prunes_hybrid_model(worlds, layout):
    layout = replace(layout, config={"num_layers": 4})
    dead = parse_dead(PATTERNS["mixed"])
    check(layout, dead, worlds(layout.world).run(compare_arms, layout, dead))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", (*CORE, *REST), ids=lambda layout: layout.name)
def test_whole_matrix(worlds, layout, pattern):
    dead = parse_dead(PATTERNS[pattern])
    check(layout, dead, worlds(layout.world).run(compare_arms, layout, dead, limit=120))
