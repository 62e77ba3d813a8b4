"""Train a tiny model twice, unpruned and pruned, and compare everything that training leaves behind, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import gradprune

VOCABULARY = 11


class TinyModel(torch.nn.Module):
    """Embedding, dropout, batch norm (a buffer that the forward writes), a head, and a parameter that nobody uses."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.mix = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(width, VOCABULARY)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.mix(self.embed(ids))))
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


class WideModel(TinyModel):
    """Logits over a vocabulary much larger than a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 512)


def make_batch(rows: int, tokens: int, *, dead: bool, seed: int, off_policy: float = 0.3) -> dict[str, torch.Tensor]:
    """A batch whose rows hold `tokens` scored tokens; a dead one has advantages of zero, or a mask of zero, per row."""
    gen = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, tokens, generator=gen) > 0.3).float()
    mask[:, 0] = 1
    adv = torch.randn(rows, generator=gen)
    if dead:
        masked = torch.rand(rows, generator=gen) < 0.3
        masked[0] = False
        mask[masked] = 0
        adv[~masked] = 0
    return {
        "ids": torch.randint(0, VOCABULARY, (rows, tokens + 1), generator=gen),
        "old": -2.4 + off_policy * torch.randn(rows, tokens, generator=gen),
        "adv": adv,
        "mask": mask,
    }


@dataclass
class Arm:
    """All that a run leaves behind, by name; `step` is the compiled step of a pruned arm."""

    values: dict[str, Any] = field(default_factory=dict)
    step: Any = None

    def keep(self, name: str, value: torch.Tensor | None) -> None:
        self.values[name] = None if value is None else value.detach().clone()


def train(
    step: Callable[..., Any],
    updates: Sequence[Sequence[dict[str, torch.Tensor]]],
    *,
    compiled: bool,
    before: Callable[[int, int], None] = lambda update, microbatch: None,
    dtype: torch.dtype = torch.float32,
    zero: str = "adv * mask",
    plan: bool = False,
    **options: Any,
) -> Arm:
    """Run AdamW (weight decay: it moves on a gradient of zero, not on None) over some updates of microbatches."""
    torch.manual_seed(0)
    model = TinyModel().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    arm = Arm(step=gradprune.compile(step, zero=zero, **options) if compiled else step)
    for u, batches in enumerate(updates):
        optimizer.zero_grad()
        for m, batch in enumerate(bound(batches) if plan and compiled else batches):
            before(u, m)
            loss, metrics = arm.step(model, batch)
            (loss / len(batches)).backward()
            arm.keep(f"{u}.{m}.loss", loss)
            for name, value in metrics.items():
                arm.keep(f"{u}.{m}.{name}", value)
        for name, parameter in model.named_parameters():
            arm.keep(f"{u}.grad.{name}", parameter.grad)
        optimizer.step()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        arm.keep(name, tensor)
    for index, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            arm.keep(f"optimizer.{index}.{name}", value)
    arm.keep("rng", torch.get_rng_state())
    return arm


def bound(batches: Sequence[dict[str, torch.Tensor]]) -> Any:
    """The batches under a plan made from their advantages and masks."""
    rows = [len(batch["adv"]) for batch in batches]
    width = max(batch["mask"].shape[1] for batch in batches)
    masks = [torch.nn.functional.pad(batch["mask"], (0, width - batch["mask"].shape[1])) for batch in batches]
    advantages = torch.cat([batch["adv"] for batch in batches])
    return gradprune.StepPlan.from_rollout(advantages, torch.cat(masks), rows).bind(batches)


def assert_equal(pruned: Arm, unpruned: Arm) -> None:
    """The one comparison: same names, None where None, and the same bits."""
    assert pruned.values.keys() == unpruned.values.keys()
    for name, value in unpruned.values.items():
        other = pruned.values[name]
        assert (value is None) == (other is None), f"{name}: {other} instead of {value}"
        assert value is None or torch.equal(value, other), f"{name} differs"


def outcomes(arm: Arm) -> str:
    """One letter a microbatch: d for dead, l for live."""
    return "".join("l" if decision.outcome else "d" for decision in arm.step.explain().decisions)
