"""attach(): what `gradprune.compile` must know of a Megatron model and its parallel layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from gradprune.agreement import Agreement, Place
from gradprune.errors import PruneError
from gradprune.facts import Reason
from gradprune.megatron.grad_sync import GradSync
from gradprune.megatron.recomputation import forgetting
from gradprune.megatron.settings import module_reasons_against, reasons_against
from gradprune.megatron.stages import Stages
from gradprune.planner import StepPlan
from gradprune.planning.binding import PlannedMicrobatch
from gradprune.schedule import Forward, PlainSchedule

_PLANS_REMEMBERED = 8


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    config: Any = None,
    *,
    strict: bool = False,
    timeout: timedelta = timedelta(minutes=10),
) -> Attachment:
    """The schedule for ``gradprune.compile(forward_step, zero=..., schedule=attach(model_chunks))``.

    model_chunks: the model, or the list of its virtual stages, as ``get_forward_backward_func()`` takes it; wrapped in
        DDP if it will be. A collective where the default process group is not gloo: call it on all ranks.
    config: the TransformerConfig; by default the model's own.
    strict: raise PruneError for a setting under which nothing can be pruned, instead of running live.
    timeout: of the CPU group in which ranks agree.

    Wraps methods of these objects until `Attachment.detach`, and nothing else: no class, no module of megatron.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, Sequence) else [model_chunks]
    if not chunks:
        raise PruneError("model_chunks is empty: pass the model that get_forward_backward_func() will get")
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise PruneError(f"model_chunks holds a {type(chunk).__name__}: pass the model, or a list of its chunks")
        if any(chunk in attached for attached in _attached):
            raise PruneError("these model chunks are attached already: call detach() on that attachment first")
    attachment = Attachment(chunks, get_model_config(chunks[0]) if config is None else config, timeout)
    reason = attachment.refusal()
    if strict and reason is not None:
        attachment.detach()
        raise PruneError(f"strict: {reason}")
    return attachment


_attached: list[list[torch.nn.Module]] = []


class Attachment(PlainSchedule):
    """A `gradprune.schedule.Schedule` for megatron-core; made by `attach`. A context manager that detaches."""

    def __init__(self, chunks: list[torch.nn.Module], config: Any, timeout: timedelta) -> None:
        self._chunks, self._config = chunks, config
        self._module_reason = next(module_reasons_against(chunks), None)
        self._grad_sync, self._stages = GradSync(chunks), Stages(chunks)
        self._agreement = Agreement(timeout)
        self._agreed: deque[tuple[PlannedMicrobatch, ...]] = deque(maxlen=_PLANS_REMEMBERED)
        self._undo = ExitStack()
        self._undo.enter_context(self._grad_sync.watch())
        self._undo.enter_context(self._stages.watch())
        self._undo.callback(self._agreement.close)
        self._detached = False
        _attached.append(chunks)

    def detach(self) -> None:
        """Take every wrapper off again. A step that still uses this schedule runs live from then on."""
        if not self._detached:
            self._detached = True
            _attached[:] = [chunks for chunks in _attached if chunks is not self._chunks]
            self._undo.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def refusal(self) -> Reason | None:
        if self._detached:
            return Reason("setting", "the schedule was detached from its model: attach it again")
        return self._module_reason or next(reasons_against(self._config, self._chunks), None)

    def objection(self, planned: PlannedMicrobatch | None) -> str | None:
        if not self._grad_sync.knows_order:
            return "the first whole step runs live, to learn the order in which DDP reduces gradients"
        if not self.decides_together() or any(planned is item for plan in self._agreed for item in plan):
            return None
        return (
            "ranks share collectives in this backward and have not agreed on it: call plan = step.agree(plan) on every "
            "rank, and bind the plan that it returns"
        )

    def decides_together(self) -> bool:
        return _backward_crosses_ranks()

    def computes_loss(self, model: torch.nn.Module) -> bool:
        return self._stages.computes_loss(model)

    def stage_inputs(self, model: torch.nn.Module) -> Sequence[torch.Tensor]:
        return self._stages.inputs(model)

    def forward(self, model: torch.nn.Module) -> Forward:
        return self._stages.forward(model)

    def recomputes(self, hook: Any) -> Callable[[], None] | None:
        return forgetting(hook)

    def kept_buffers(self, model: torch.nn.Module) -> Sequence[torch.Tensor]:
        return self._stages.kept_buffers(model)

    def dead_forward(self, model: torch.nn.Module) -> AbstractContextManager[Sequence[torch.Tensor]]:
        return self._stages.dead_forward(model)

    def agree(self, plan: StepPlan, proved: bool) -> tuple[StepPlan, bool]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return plan, proved
        here = any(self._stages.computes_loss(chunk) for chunk in self._chunks)
        place = _place()
        plan, proved = self._agreement.settle(plan, place, proved if here else None)
        self._agreed.append(plan.ranks[place.of(plan)])
        return plan, proved


def _place() -> Place:
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
    shares = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
    return Place(parallel_state.get_data_parallel_rank(), shares)


def _backward_crosses_ranks() -> bool:
    """Whether ranks wait for each other inside a backward, as tensor, context and expert parallelism do."""
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
    return any(dist.get_world_size(group) > 1 for group in groups)
