"""What the user asks of a pruned step, and one microbatch before it runs. Data only."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradprune.counting.fit import BatchShape
from gradprune.errors import PruneError
from gradprune.facts import Hypothesis
from gradprune.planning.binding import PlannedMicrobatch
from gradprune.runtime.batch import family
from gradprune.runtime.guard import OnViolation
from gradprune.runtime.known import Known


@dataclass(frozen=True)
class Policy:
    """What the user asks for; see `gradprune.compile`. Raises PruneError for what makes no sense."""

    hypothesis: Hypothesis
    audit: float
    on_violation: OnViolation
    strict: bool

    def __post_init__(self) -> None:
        if not 0 <= self.audit <= 1:
            raise PruneError(f"audit is {self.audit}: pass a share between 0 and 1")
        if self.on_violation not in ("poison", "raise"):
            raise PruneError(f"on_violation is {self.on_violation!r}: pass 'poison' or 'raise'")


@dataclass(frozen=True)
class Microbatch:
    """One microbatch before it runs. models: by name (``""`` for the only one). named: its tensors by name."""

    index: int
    models: Mapping[str, torch.nn.Module]
    known: Known
    named: Mapping[str, torch.Tensor]
    constants: tuple[Any, ...] = ()

    @functools.cached_property
    def family(self) -> tuple[Any, ...]:
        """What is known before it runs of the program that it will be."""
        return family(self.models, self.named, self.constants)

    @functools.cached_property
    def shape(self) -> BatchShape:
        """Key of its FLOPs."""
        return shape_of(self.models, self.named)

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for model in self.models.values() for _, buffer in model.named_buffers()]

    @property
    def about(self) -> str:
        place = f" (planned as {self.known.plan.index})" if self.known.plan else ""
        return f"microbatch {self.index}{place}"

    def tokens(self, factors: tuple[str, ...]) -> tuple[int, int]:
        """Its real tokens, and the padding beyond them; see `tokens_of`."""
        return tokens_of(self.known.plan, slots_of(self.named, factors))


def shape_of(models: Mapping[str, torch.nn.Module], named: Mapping[str, torch.Tensor]) -> BatchShape:
    """Key of the FLOPs of a microbatch with the tensors `named`."""
    modes = tuple((id(model), model.training) for model in models.values())
    return BatchShape.of(named.values(), program=(modes, tuple(named)))


def slots_of(named: Mapping[str, torch.Tensor], factors: tuple[str, ...]) -> int:
    """How many positions the largest of the factors has."""
    wanted = {*factors, *(f"batch.{factor}" for factor in factors)}
    return max((tensor.numel() for name, tensor in named.items() if name in wanted), default=0)


def tokens_of(plan: PlannedMicrobatch | None, slots: int) -> tuple[int, int]:
    """Real tokens, and the padding beyond them: what the plan knows of lengths, and slots in the factors.

    Without a plan every slot is taken for a token.
    """
    if plan is None or not plan.tokens:
        return slots, 0
    real = plan.tokens - plan.padding
    return real, max(plan.tokens, slots) - real
