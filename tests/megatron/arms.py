"""Some optimizer steps on one rank, unpruned and pruned from the same state, compared bit for bit. Runs in a worker."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

import gradprune
import gradprune.megatron
from gradprune.megatron import stages
from gradprune.patching import replaced
from gradprune.runtime.guard import Arriving
from gradprune.runtime.trust import Trust
from tests.megatron.layouts import LENGTH, MICROBATCHES, ROWS, Layout, Trainee, build, make_batches, make_forward_step

LATE = 3
Dead = list[list[set[int]]]
"""By optimizer step, by data-parallel rank: the microbatches whose advantages are all zero."""


@dataclass
class Trace:
    """What an arm left behind on one rank. backwards: how many reached the first parameter of each chunk."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    backwards: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    dead: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """One rank's comparison, picklable."""

    differences: list[str]
    backwards: int
    backwards_pruned: int
    dead: int
    reasons: list[str]
    collectives: dict[str, int]
    collectives_pruned: dict[str, int]


def parse_dead(text: str) -> Dead:
    """``"0,3|1;|2"``: step 0 has 0 and 3 dead on data rank 0 and 1 on data rank 1, step 1 has 2 on data rank 1."""
    return [[{int(item) for item in rank.split(",") if item} for rank in step.split("|")] for step in text.split(";")]


def compare_arms(
    layout: Layout, dead: Dead, without: tuple[str, ...] = (), skipped: tuple[int, ...] = (), resumed: int | None = None
) -> Outcome:
    """Both arms on this rank.

    without: remedies to leave out, by name, to show that they are needed. skipped: steps that the optimizer does not
    take, as after an overflow. resumed: the step before which everything is saved, built anew and loaded.
    """
    unpruned = run_arm(layout, dead, False, (), skipped, resumed)
    pruned = run_arm(layout, dead, True, without, skipped, resumed)
    names = sorted(unpruned.tensors.keys() | pruned.tensors.keys())
    return Outcome(
        differences=[name for name in names if not _equal(unpruned.tensors.get(name), pruned.tensors.get(name))],
        backwards=unpruned.backwards,
        backwards_pruned=pruned.backwards,
        dead=pruned.dead,
        reasons=pruned.reasons,
        collectives=dict(unpruned.collectives),
        collectives_pruned=dict(pruned.collectives),
    )


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_floating_point() and one.isnan().any():  # of a step that overflowed
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    return torch.equal(one, other)


def run_arm(
    layout: Layout,
    dead: Dead,
    prune: bool,
    without: tuple[str, ...] = (),
    skipped: tuple[int, ...] = (),
    resumed: int | None = None,
) -> Trace:
    trace, saved = Trace(), None
    for first, last in ((0, resumed), (resumed, len(dead))) if resumed else ((0, len(dead)),):
        trainee = build(layout)
        if saved is not None:
            _load(trainee, saved)
        with ExitStack() as stack:
            stack.callback(parallel_state.destroy_model_parallel)
            stack.enter_context(_counted_collectives(trace.collectives))
            step = _make_step(layout, trainee, prune, without, stack)
            _count_backwards(trainee, trace)
            for number in range(first, last):
                run_schedule(layout, trainee, step, dead[number], number, trace)
                if number not in skipped:
                    succeeded, norm, _ = trainee.optimizer.step()
                    trace.tensors[f"step {number} succeeded"] = torch.tensor(succeeded)
                    trace.tensors[f"step {number} gradient norm"] = torch.tensor(-1.0 if norm is None else norm)
            _read_state(trainee, trace)
            saved = _save(trainee)
            if prune:
                decisions = step.explain().decisions
                trace.dead += sum(not decision.outcome for decision in decisions)
                trace.reasons += sorted({decision.outcome.reason for decision in decisions if decision.outcome})
    return trace


def _make_step(layout: Layout, trainee: Trainee, prune: bool, without: tuple[str, ...], stack: ExitStack) -> Any:
    step = make_forward_step(layout)
    if not prune:
        return step
    schedule = stack.enter_context(gradprune.megatron.attach(trainee.chunks, trainee.config))
    for remedy in without:
        REMEDIES[remedy](schedule, stack)
    return gradprune.compile(step, zero="advantages * loss_mask", schedule=schedule)


def run_schedule(layout: Layout, trainee: Trainee, step: Any, dead: list[set[int]], number: int, trace: Trace) -> None:
    """The forwards and backwards of one optimizer step; what they leave goes into `trace`."""
    rank = parallel_state.get_data_parallel_rank()
    iterators = bind(layout, step, make_batches(100 * number + rank, dead[rank]))
    for chunk in trainee.chunks:
        chunk.zero_grad_buffer()
    trainee.optimizer.zero_grad()
    metrics = forward_backward(layout, trainee, step, iterators)
    for index, row in enumerate(metrics):
        trace.tensors |= {f"step {number} {name} of microbatch {index}": value for name, value in row.items()}
    for name, parameter in _parameters(trainee):
        if parameter.requires_grad:
            trace.tensors[f"step {number} main_grad {name}"] = parameter.main_grad.clone()


def forward_backward(layout: Layout, trainee: Trainee, step: Any, iterators: list[Any], **kwargs: Any) -> list[Any]:
    """Megatron's own schedule over MICROBATCHES microbatches; the last stage's metrics of each."""
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if layout.vpp else iterators[0],
        model=trainee.chunks if layout.vpp else trainee.chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH * (ROWS if layout.packed else 1),
        micro_batch_size=1 if layout.packed else ROWS,
        **kwargs,
    )


def bind(layout: Layout, step: Any, batches: list[Any]) -> list[Any]:
    """An iterator for each chunk; bound to a plan that all ranks agreed on if `step` is compiled."""
    chunks = layout.vpp or 1
    if not hasattr(step, "explain"):
        return [iter(batches) for _ in range(chunks)]
    advantages = torch.cat([batch["advantages"] for batch in batches]).cpu()
    mask = torch.cat([batch["loss_mask"] for batch in batches]).cpu()
    plan = step.agree(gradprune.StepPlan.from_rollout(advantages, mask, ROWS))
    return [plan.bind(batches) for _ in range(chunks)]


def _parameters(trainee: Trainee) -> list[tuple[str, Any]]:
    return [
        (f"{index}.{name}", value)
        for index, chunk in enumerate(trainee.chunks)
        for name, value in chunk.module.named_parameters()
    ]


def _count_backwards(trainee: Trainee, trace: Trace) -> None:
    def counted(gradient: torch.Tensor) -> None:
        trace.backwards += 1

    for chunk in trainee.chunks:
        first = next(parameter for parameter in chunk.module.parameters() if parameter.requires_grad)
        first.register_hook(counted)


def _save(trainee: Trainee) -> Any:
    return copy.deepcopy(([chunk.module.state_dict() for chunk in trainee.chunks], trainee.optimizer.state_dict()))


def _load(trainee: Trainee, saved: Any) -> None:
    for chunk, state in zip(trainee.chunks, saved[0], strict=True):
        chunk.module.load_state_dict(state)
    trainee.optimizer.load_state_dict(saved[1])


def _read_state(trainee: Trainee, trace: Trace) -> None:
    """Parameters, buffers, optimizer state and random streams at the end."""
    for name, parameter in _parameters(trainee):
        trace.tensors[f"parameter {name}"] = parameter.detach().clone()
    for index, chunk in enumerate(trainee.chunks):
        for name, buffer in chunk.module.named_buffers():
            trace.tensors[f"buffer {index}.{name}"] = buffer.clone()
    optimizers = getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer])
    for index, optimizer in enumerate(optimizers):
        states = optimizer.optimizer.state.values()
        for number, state in enumerate(states):
            for key, value in state.items():
                trace.tensors[f"optimizer {index} {key} {number}"] = torch.as_tensor(value).clone()
    trace.tensors["random state"] = torch.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        trace.tensors[f"random state {name}"] = state.clone()


def _counted_collectives(counts: Counter[str]) -> ExitStack:
    """Count calls of torch.distributed's collectives while open."""
    stack = ExitStack()
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        function = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _function(*args, **kwargs)

        stack.enter_context(replaced(dist, name, counted))
    return stack


def _without_launch(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(schedule._grad_sync, "_launch_missing", lambda order, force_all_reduce: None))


def _without_stage_gradient(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(schedule._stages, "inputs", lambda model: []))


def _without_input_alias(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(stages, "_receiving", lambda owner, tensors, after: nullcontext()))


def _without_router_counts(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(schedule._stages, "_routers", [[] for _ in schedule._chunks]))


def _without_agreement(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(schedule, "agree", lambda plan, proved: (plan, proved)))
    stack.enter_context(replaced(schedule, "objection", lambda planned: None))


def _without_refusal(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(schedule, "refusal", lambda: None))


def _without_confirmation(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(schedule, "decides_together", lambda: False))
    stack.enter_context(replaced(schedule, "objection", lambda planned: None))


def _with_late_outcomes(schedule: Any, stack: ExitStack) -> None:
    """What the device tells the last rank of a trial is late, by as many questions as this says."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return
    asked = itertools.count()
    values: Any = Arriving.values

    def late(arriving: Arriving) -> list[float] | None:
        return None if next(asked) < LATE else values(arriving)

    stack.enter_context(replaced(Arriving, "values", late))
    stack.enter_context(replaced(Arriving, "wait", lambda arriving: [next(asked) for _ in range(LATE)]))


def _without_trial(schedule: Any, stack: ExitStack) -> None:
    stack.enter_context(replaced(Trust, "asks", lambda *args, **kwargs: False))


REMEDIES: dict[str, Callable[[Any, ExitStack], None]] = {
    "launch": _without_launch,
    "stage gradient": _without_stage_gradient,
    "input alias": _without_input_alias,
    "router counts": _without_router_counts,
    "agreement": _without_agreement,
    "refusal": _without_refusal,
    "trial": _without_trial,
    "confirmation": _without_confirmation,
    "prompt outcomes": _with_late_outcomes,
}
"""Ways to leave out what `gradprune.megatron` does about one trap each; the last makes a device slow."""
