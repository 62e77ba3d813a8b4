"""A tiny model under fully_shard, trained pruned and unpruned on each rank; run by test_fsdp.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradprune
from gradprune import fully_sharded
from tests.step.arms import make_batch
from tests.wrapping.ranks import issued
from tests.wrapping.replicated import Step, Used


@dataclass(frozen=True)
class Case:
    """dead: a string for each rank; a letter a microbatch, d or l; a space between optimizer steps. outcomes: what
    happens to each microbatch. accumulate: gradients are reduced by the last backward of an optimizer step only."""

    dead: tuple[str, str]
    outcomes: str
    attached: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: bool = False
    audit: float = 0.0
    surprise: bool = False


CASES = {
    "not attached": Case(("dd ld", "dd ld"), "ll ll", attached=False),
    "dead on all ranks": Case(("dd ld dd", "dd ld dd"), "dd ld dd"),
    "dead on one rank": Case(("dl ld dd", "ll ld dl"), "ll ld dl"),
    "kept whole after the forward": Case(
        ("dd ld dl", "dd ld dl"), "dd ld dl", options={"reshard_after_forward": False}
    ),
    "bfloat16": Case(
        ("dd ld dd", "dd ld dd"),
        "dd ld dd",
        options={"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ),
    "reduced at the end": Case(("dl ld dd ld", "dl ld dd ld"), "dl ll dd ll", accumulate=True),
    "audited": Case(("dd ld", "dd ld"), "dd ld", audit=1.0),
    "another program than proved": Case(("dd dd dd", "dd dd dd"), "dd ll ld", surprise=True),
}


class Surprising(Step):
    """Another term joins in the second optimizer step, from where no look at the state finds it in time."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = iter("  xx  ")

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.surprise: Any = next(self._calls).strip()
        return super().__call__(model, batch)


class WithoutNorm(Used):
    """Batch norm on a CPU takes no parameters in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def work(rank: int, world: int, name: str) -> list[dict[str, Any]]:
    return [train(rank, CASES[name], pruned) for pruned in (False, True)]


def train(rank: int, case: Case, pruned: bool) -> dict[str, Any]:
    """Everything that training leaves behind on this rank, by name, and what was decided."""
    torch.manual_seed(0)
    model: Any = (WithoutNorm() if "mp_policy" in case.options else Used()).eval()
    for part in (model.mix, model.head, model):
        fully_shard(part, **case.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    step: Any = Surprising() if case.surprise else Step()
    if pruned:
        more = {"schedule": fully_sharded.attach(model)} if case.attached else {}
        step = gradprune.compile(step, zero="adv * mask", audit=case.audit, **more)
    kept: dict[str, Any] = {}
    collectives = []
    for update, letters in enumerate(case.dead[rank].split()):
        batches = [make_batch(3, 6, dead=letter == "d", seed=10 * update + m) for m, letter in enumerate(letters)]
        optimizer.zero_grad()
        for m, batch in enumerate(_planned(step, batches) if pruned and case.attached else batches):
            model.set_requires_gradient_sync(not case.accumulate or m == len(letters) - 1)
            before = issued()
            loss = step(model, batch)
            loss.backward()
            collectives.append(issued() - before)
            kept[f"{update}.{m} loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            kept[f"{update} grad {name}"] = None if grad is None else grad.to_local().clone()
        optimizer.step()
    kept.update({name: parameter.detach().to_local().clone() for name, parameter in model.named_parameters()})
    kept["collectives"] = collectives
    if pruned:
        kept["decisions"] = [str(decision) for decision in step.explain().decisions]
    return kept


def _planned(step: Any, batches: list[dict[str, torch.Tensor]]) -> Any:
    advantages, masks = (torch.cat([batch[name] for batch in batches]) for name in ("adv", "mask"))
    plan = gradprune.StepPlan.from_rollout(advantages, masks, [len(batch["adv"]) for batch in batches])
    return step.agree(plan).bind(batches)
