"""A tiny model under fully_shard, trained pruned and unpruned on each rank; run by test_fsdp.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import gradprune
from tests.step.arms import make_batch
from tests.wrapping.ranks import issued
from tests.wrapping.replicated import Step, Used


def work(rank: int, world: int, letters: tuple[str, ...]) -> list[dict[str, Any]]:
    return [train(rank, letters[rank], pruned) for pruned in (False, True)]


def train(rank: int, letters: str, pruned: bool) -> dict[str, Any]:
    """Everything that training leaves behind on this rank, by name, and what was decided."""
    torch.manual_seed(0)
    model: Any = Used().eval()
    for part in (model.mix, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    step: Any = gradprune.compile(Step(), zero="adv * mask") if pruned else Step()
    kept: dict[str, Any] = {}
    before = issued()
    for index, letter in enumerate(letters):
        optimizer.zero_grad()
        loss = step(model, make_batch(3, 6, dead=letter == "d", seed=10 * index + rank))
        loss.backward()
        optimizer.step()
        kept[f"{index} loss"], kept[f"{index} collectives"] = loss.detach().clone(), issued() - before
    kept.update({name: parameter.detach().to_local().clone() for name, parameter in model.named_parameters()})
    if pruned:
        kept["decisions"] = [str(decision) for decision in step.explain().decisions]
    return kept
