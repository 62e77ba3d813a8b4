"""Collectives that a step issues write to tensors unseen by their version counters; the proof must not miss it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradprune
from gradprune.runtime.collectives import reported
from tests.step.arms import TinyModel, make_batch
from tests.wrapping.test_features import Batch, policy_loss, token_logps


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def outcomes(step: Any, count: int = 3) -> str:
    model = TinyModel()
    for seed in range(count):
        step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
    return "".join("l" if decision.outcome else "d" for decision in step.explain().decisions)


def test_reports_what_is_written_and_puts_the_methods_back():
    before = dict(vars(dist.ProcessGroup))
    written: list[torch.Tensor] = []
    ours, others, out = torch.ones(2), torch.ones(2), [torch.zeros(2)]
    with reported(written.extend):
        dist.all_reduce(ours)
        dist.all_gather(out, others)
    assert [id(tensor) for tensor in written] == [id(ours), id(out[0])]
    assert dict(vars(dist.ProcessGroup)) == before


def test_prunes_with_a_count_over_ranks():
    def step(model: Any, batch: Batch) -> torch.Tensor:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        count = batch["mask"].sum()
        dist.all_reduce(count)
        return (policy_loss(logp, batch) * batch["mask"].sum().clamp(min=1)) / count.clamp(min=1)

    assert outcomes(gradprune.compile(step, zero="adv * mask")) == "ddd"


def test_keeps_advantages_that_a_collective_changes():
    def step(model: Any, batch: Batch) -> torch.Tensor:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        dist.all_reduce(batch["adv"])
        return policy_loss(logp, batch)

    with pytest.warns(UserWarning, match="live"):
        assert outcomes(gradprune.compile(step, zero="adv * mask")) == "lll"
