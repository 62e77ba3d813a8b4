"""A tiny model under DistributedDataParallel, trained pruned and unpruned on each rank; run by test_ddp.py."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradprune
from tests.step.arms import TinyModel, make_batch
from tests.wrapping.ranks import issued


@dataclass(frozen=True)
class Case:
    """dead: one string a rank; a letter a microbatch, d or l; a space between optimizer steps."""

    dead: tuple[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    no_sync: bool = True
    model: str = "plain"
    count_globally: bool = False
    surprise: bool = False


CASES = {
    "last dead on one rank": Case(("dl ld ll", "dl ll ld")),
    "last dead on all ranks": Case(("dl ld dd", "ll ld dd")),
    "one rank has nothing live": Case(("dd dd dd", "ll ll ll")),
    "every backward reduced": Case(("dl dd ld", "ld dd dl"), no_sync=False),
    "gradients are bucket views": Case(("dl ld dd", "ll ld dd"), {"gradient_as_bucket_view": True}),
    "unused parameters are looked for": Case(
        ("dl ld dd", "ll ld dd"), {"find_unused_parameters": True}, model="unused"
    ),
    "unused and reduced every time": Case(("dd ld", "ld dd"), {"find_unused_parameters": True}, False, "unused"),
    "static graph": Case(("dl ld dd", "ll ld dd"), {"static_graph": True}, no_sync=False),
    "static graph, unused": Case(("ll ld dd", "ll ld dd"), {"static_graph": True}, False, "unused"),
    "static graph, reentrant checkpoint": Case(("ll ld dd", "ll ld dd"), {"static_graph": True}, False, "reentrant"),
    "buffers not broadcast": Case(("dl ld dd", "ll ld dd"), {"broadcast_buffers": False}),
    "token count over ranks": Case(("dl ld dd", "ll ld dd"), count_globally=True),
    "another program than proved": Case(("dl dd dd", "dl dd dd"), surprise=True),
}


class Used(TinyModel):
    """All parameters take part."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


class Reentrant(Used):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: torch.tanh(self.mix(x)), self.embed(ids), use_reentrant=True)
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


MODELS = {"plain": Used, "unused": TinyModel, "reentrant": Reentrant}


class _Hidden:
    """A switch in C++, say: Python state in which nobody sees a change."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def __bool__(self) -> bool:
        return self.on


class Step:
    """A GRPO step, which another term joins while `surprise` holds something."""

    def __init__(self, count_globally: bool = False) -> None:
        self.count_globally, self.surprise = count_globally, _Hidden()

    def __call__(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, mask = batch["ids"], batch["mask"]
        logp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio, adv = torch.exp((logp - batch["old"]).clamp(-20, 20)), batch["adv"][:, None]
        policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        if self.surprise:
            policy = policy + 0.1 * (batch["old"] - logp) ** 2
        count = mask.sum()
        if self.count_globally:
            dist.all_reduce(count)
        return (policy * mask).sum() / count.clamp(min=1)


def work(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    return {name: [train(rank, CASES[name], pruned) for pruned in (False, True)] for name in names}


def train(rank: int, case: Case, pruned: bool) -> dict[str, Any]:
    """Everything that training leaves behind on this rank, by name, and what was decided."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MODELS[case.model](), **case.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    plain = Step(case.count_globally)
    step: Any = gradprune.compile(plain, zero="adv * mask") if pruned else plain
    kept: dict[str, Any] = {}
    torch.manual_seed(7 + rank)
    before = issued()
    for u, microbatches in enumerate(case.dead[rank].split()):
        optimizer.zero_grad()
        for m, letter in enumerate(microbatches):
            batch = make_batch(3, 6 + m, dead=letter == "d", seed=100 * u + 10 * m + rank)
            plain.surprise.on = case.surprise and (rank, u, m) == (0, 1, 1)
            last = m == len(microbatches) - 1
            with model.no_sync() if case.no_sync and not last else nullcontext():
                loss = step(model, batch)
                (loss / len(microbatches)).backward()
            kept[f"{u}.{m} loss"], kept[f"{u}.{m} collectives"] = loss.detach().clone(), issued() - before
        for name, parameter in model.named_parameters():
            kept[f"{u} grad {name}"] = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
    kept.update({name: value.detach().clone() for name, value in model.state_dict().items()})
    kept["rng"] = torch.get_rng_state()
    if pruned:
        kept["decisions"] = [str(decision) for decision in step.explain().decisions]
    return kept
