"""Decorated, the loops of public GRPO code leave the same bits behind, and their dead microbatches are dead."""

from __future__ import annotations

import pytest

import gradprune
from tests.loop import shapes
from tests.loop.arms import compare
from tests.loop.shapes import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_prunes(name: str) -> None:
    shape = SHAPES[name]
    decorated = compare(shape.loop, "dldd", zero=shape.zero)
    assert decorated.outcomes == shape.outcomes


def test_prunes_method(monkeypatch: pytest.MonkeyPatch) -> None:
    method = gradprune.grpo_loop("advantages * mask", strict=True)(shapes.Actor.update_policy)

    def by_decorated_worker(t: shapes.Training) -> None:
        method(shapes.Actor(t), t)

    from tests.loop.arms import assert_equal, train

    decorated = train(by_decorated_worker, "dldd", decorate=False)
    assert_equal(decorated, train(shapes.by_worker, "dldd", decorate=False))
    assert [bool(decision.outcome) for decision in method.explain().decisions] == [False, True, False, False]
