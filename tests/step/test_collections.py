"""A dead microbatch does not make Python's collector run: a full collection takes as long as a forward."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import gradprune
from tests.step.arms import TinyModel, make_batch
from tests.step.losses import Loss, grpo


class Deep(TinyModel):
    """Saves some thousand tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(400))

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The generations of the collections that begin inside."""
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield begun
    finally:
        gc.callbacks.remove(note)


def test_dead_microbatch_brings_on_no_collection():
    model, step = Deep(), gradprune.compile(Loss(grpo), zero="adv * mask", allow_sync=True)
    batches = [make_batch(4, 6, dead=True, seed=seed) for seed in range(2)]
    step(model, batches[0])
    assert gc.isenabled()
    gc.collect()  # what other tests made brings on none
    with counted() as begun:
        step(model, batches[1])
    # What the run made is counted when the collector is on again: before its segment, after it, and at its end.
    assert len(begun) <= 3 and set(begun) <= {0}
    assert gc.isenabled() and [bool(decision.outcome) for decision in step.explain().decisions] == [False, False]


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_left_as_it_was(enabled):
    class Fault(Exception):
        pass

    def step(model, batch):
        loss = Loss(grpo)(model, batch)
        seen.append(gc.isenabled())
        if armed:
            raise Fault
        return loss

    armed: list[bool] = []
    seen: list[bool] = []
    model, pruned = TinyModel(), gradprune.compile(step, zero="adv * mask", allow_sync=True)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        for seed in range(2):
            pruned(model, make_batch(4, 6, dead=True, seed=seed))
            assert gc.isenabled() == enabled
        armed.append(True)
        with pytest.raises(Fault):
            pruned(model, make_batch(4, 6, dead=True, seed=2))
        assert gc.isenabled() == enabled
        assert seen[-1] is False
    finally:
        (gc.enable if before else gc.disable)()
