"""What a training framework adds to a dead microbatch: settings that forbid it, tensors besides the parameters that
must still receive a zero, state that a forward under no_grad would miss, and ranks that must decide together.

`gradprune.compile(step, zero=..., schedule=...)` talks to a framework through this protocol and imports none.
`gradprune.megatron.attach` makes one for megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gradprune.facts import Reason
from gradprune.planner import StepPlan
from gradprune.planning.binding import PlannedMicrobatch


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Forward:
    """What surrounds one forward whose microbatch may turn out dead.

    first: open while it runs. again: opens while it is computed again, for a backward that comes after all: puts back
    what it reads besides its arguments. dead: to be called if no backward will come. live: to be called if one will.
    """

    first: AbstractContextManager[Any] = field(default_factory=nullcontext)
    again: Callable[[], AbstractContextManager[Any]] = nullcontext
    dead: Callable[[], None] = _nothing
    live: Callable[[], None] = _nothing


class Schedule(Protocol):
    """How a dead microbatch fits into a framework's schedule of forwards and backwards."""

    def refusal(self) -> Reason | None:
        """Why nothing can be pruned here at all, by the setting's name; None if something can."""

    def objection(self, planned: PlannedMicrobatch | None) -> str | None:
        """Why this microbatch must run live though its zeros are known; None if it may be dead.

        For instance a plan that the ranks have not agreed on. `planned` is None where the zeros were read from the
        batch. Costs no synchronisation.
        """

    def decides_together(self) -> bool:
        """Whether ranks wait for each other inside a backward. Then all of them prune a microbatch or none does, and
        nothing may hang on what has arrived from a device so far: it counts from the next `agree` on."""

    def computes_loss(self, model: torch.nn.Module) -> bool:
        """Whether the output of `model` goes into the loss function here, and not to the next pipeline stage."""

    def stage_inputs(self, model: torch.nn.Module) -> Sequence[torch.Tensor]:
        """What `model` has just received from the pipeline stage before, which waits for its gradient.

        Leaves that require grad; none on a first stage.
        """

    def forward(self, model: torch.nn.Module) -> Forward:
        """For a forward through `model`, which computes the loss, that is about to begin."""

    def shields(self, module: torch.nn.Module) -> bool:
        """Whether the gradient of what `module` returned must not be looked at there, since hooks of a wrapper would
        take that for the beginning of a backward."""

    def recomputes(self, hook: Any) -> Callable[[], None] | None:
        """None, unless `hook`, which the forward put on a tensor inside the model, only computes again what the forward
        threw away; then what lets go of that, where no backward will come."""

    def owners(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parameters whose gradients are those of `leaves` of a graph, in the same order."""

    def ended(self, model: torch.nn.Module) -> None:
        """A microbatch through `model` was cut off from its graph: no backward will come."""

    def kept_buffers(self, model: torch.nn.Module) -> Sequence[torch.Tensor]:
        """Buffers that recomputation in a backward writes, and `forward` keeps right for a microbatch without one."""

    def dead_forward(self, model: torch.nn.Module) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Open around the forward of a dead microbatch through `model`, which computes no loss, under no_grad.

        Yields the stage's inputs, which keep their shape: the dead backward must deliver exact zeros to them.
        """

    def agree(self, plan: StepPlan, proved: bool) -> tuple[StepPlan, bool]:
        """`plan` with each microbatch dead only where it may be so on every rank that shares its collectives.

        Called once a rollout, on every rank, before the first forward. proved: whether this rank, if it computes the
        loss, is going to prune what the plan calls dead; returned is whether all ranks that compute it for this one
        are, and so whether a stage that computes none may prune. Raises PlanError, on every rank, where ranks that
        must hold the same plan do not.
        """


class PlainSchedule:
    """One process, or data parallelism whose gradients are reduced after the last backward. Others differ from it."""

    def refusal(self) -> Reason | None:
        return None

    def objection(self, planned: PlannedMicrobatch | None) -> str | None:
        return None

    def decides_together(self) -> bool:
        return False

    def computes_loss(self, model: torch.nn.Module) -> bool:
        return True

    def stage_inputs(self, model: torch.nn.Module) -> Sequence[torch.Tensor]:
        return ()

    def forward(self, model: torch.nn.Module) -> Forward:
        return Forward()

    def shields(self, module: torch.nn.Module) -> bool:
        return False

    def recomputes(self, hook: Any) -> Callable[[], None] | None:
        return None

    def owners(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return leaves

    def ended(self, model: torch.nn.Module) -> None:
        pass

    def kept_buffers(self, model: torch.nn.Module) -> Sequence[torch.Tensor]:
        return ()

    def dead_forward(self, model: torch.nn.Module) -> AbstractContextManager[Sequence[torch.Tensor]]:
        return nullcontext(())

    def agree(self, plan: StepPlan, proved: bool) -> tuple[StepPlan, bool]:
        return plan, proved


no_schedule: Schedule = PlainSchedule()
