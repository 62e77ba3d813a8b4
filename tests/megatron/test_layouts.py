"""Pruned training equals unpruned training bit for bit, in every parallel layout, and prunes what it should."""

from __future__ import annotations

import pytest

from tests.megatron.arms import compare_arms, parse_dead
from tests.megatron.matrix import CORE, PATTERNS, REST, check


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", CORE, ids=lambda layout: layout.name)
def test_prunes_and_equals(worlds, layout):
    dead = parse_dead(PATTERNS["mixed"])
    check(layout, dead, worlds(layout.world).run(compare_arms, layout, dead))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", (*CORE, *REST), ids=lambda layout: layout.name)
def test_whole_matrix(worlds, layout, pattern):
    dead = parse_dead(PATTERNS[pattern])
    check(layout, dead, worlds(layout.world).run(compare_arms, layout, dead, limit=120))
