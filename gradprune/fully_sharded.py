"""Models under ``fully_shard``: what `gradprune.compile` must know of them, and how their ranks decide together.

    schedule = gradprune.fully_sharded.attach(model)      # after fully_shard, on every rank
    step = gradprune.compile(step, zero="advantages * mask", schedule=schedule)
    plan = step.agree(plan)                               # once a rollout, on every rank, before the first forward

Forward and backward of a sharded model gather parameters, and its backward reduces gradients: ranks that skip a
backward must all skip it. Private names relied upon, tried with torch 2.11 and 2.13: ``FSDPModule._get_fsdp_state()``,
of a state ``_fsdp_param_groups`` (2.11: ``_fsdp_param_group``), of a group ``fsdp_params``, ``reduce_grads`` and
``_partial_reduce_output``, of a parameter ``sharded_param``, ``_unsharded_param`` and ``unsharded_accumulated_grad``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradprune.agreement import Agreement, Place
from gradprune.errors import PruneError
from gradprune.planner import StepPlan
from gradprune.planning.binding import PlannedMicrobatch
from gradprune.runtime.data_parallel import is_sharded
from gradprune.schedule import PlainSchedule

_PLANS_REMEMBERED = 8


def attach(
    model: torch.nn.Module, *, data_rank: int | None = None, timeout: timedelta = timedelta(minutes=10)
) -> FullySharded:
    """The schedule for ``gradprune.compile(step, zero=..., schedule=attach(model))``.

    model: a module to which, or to parts of which, ``torch.distributed.fsdp.fully_shard`` was applied.
    data_rank: ranks with the same one see the same data; by default each rank sees its own.
    timeout: of the CPU group in which ranks agree.

    A collective where the default process group is not gloo: call it on all ranks. Raises PruneError where nothing is
    sharded, or torch.distributed is not initialized.
    """
    if not isinstance(model, torch.nn.Module) or not any(map(is_sharded, model.modules())):
        raise PruneError(f"{type(model).__name__} is not sharded: apply torch.distributed.fsdp.fully_shard first")
    if not dist.is_initialized():
        raise PruneError("torch.distributed is not initialized: call init_process_group before attach")
    return FullySharded(model, dist.get_rank() if data_rank is None else data_rank, timeout)


class FullySharded(PlainSchedule):
    """A `gradprune.schedule.Schedule` for ``fully_shard``; made by `attach`."""

    def __init__(self, model: torch.nn.Module, data_rank: int, timeout: timedelta) -> None:
        self._sharded: list[Any] = [module for module in model.modules() if is_sharded(module)]
        self._place = Place(data_rank, (tuple(range(dist.get_world_size())),))
        self._agreement = Agreement(timeout)
        self._agreed: deque[tuple[PlannedMicrobatch, ...]] = deque(maxlen=_PLANS_REMEMBERED)

    def objection(self, planned: PlannedMicrobatch | None) -> str | None:
        if not any(planned is item for plan in self._agreed for item in plan):
            return (
                "the model is fully sharded and its ranks have not agreed on this microbatch: call plan = "
                "step.agree(plan) on every rank, and bind the plan that it returns"
            )
        if any(group.reduce_grads and _waits(group) for group in self._groups()):
            return "gradients of earlier microbatches wait to be reduced by this one's backward"
        return None

    def decides_together(self) -> bool:
        return True

    def agree(self, plan: StepPlan, proved: bool) -> tuple[StepPlan, bool]:
        plan, proved = self._agreement.settle(plan, self._place, proved)
        self._agreed.append(plan.ranks[self._place.of(plan)])
        return plan, proved

    def shields(self, module: torch.nn.Module) -> bool:
        return any(module is sharded for sharded in self._sharded)

    def owners(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        sharded = {
            id(unsharded): parameter.sharded_param
            for group in self._groups()
            for parameter in group.fsdp_params
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None
        }
        return [sharded.get(id(leaf), leaf) for leaf in leaves]

    def ended(self, model: torch.nn.Module) -> None:
        """Free the parameters that the forward gathered, as the end of a backward does."""
        for module in self._sharded:
            module.reshard()

    def _groups(self) -> Iterator[Any]:
        for module in self._sharded:
            state = module._get_fsdp_state()
            # torch 2.11 knows one group a module.
            yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])


def _waits(group: Any) -> bool:
    """Whether the group holds gradients that are not reduced yet."""
    if group._partial_reduce_output is not None:
        return True
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        if parameter.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None):
            return True
    return False
