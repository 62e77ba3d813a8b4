"""A pipeline stage that computes no loss: dead where the plan says so and the stage that computes it has a proof.

The proof lives where the loss does. This stage learns of it when ranks agree on a plan, and watches at its own end
that the gradient which comes back is exactly zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from gradprune.facts import Dead
from gradprune.planning.binding import BoundPlan, PlannedMicrobatch
from gradprune.runtime.attempts import Counting
from gradprune.runtime.boundary import Boundary, Call, float_leaves, replace, trainable_modules
from gradprune.runtime.dead import Delivery
from gradprune.runtime.known import Known
from gradprune.runtime.microbatch import Microbatch
from gradprune.runtime.pruner import Pruner
from gradprune.runtime.runs import same_kernels


def run_stage(pruner: Pruner, iterator: Any, model: torch.nn.Module, call: Callable[[], Any]) -> Any:
    """``call()``, a forward_step through `model` with `iterator`: ``(output_tensor, loss_func)``, live or dead.

    Only a bound plan can say that a microbatch is dead here; `iterator` may be bound to None where the stage reads no
    data, and moves on with each call.
    """
    bound = iterator if isinstance(iterator, BoundPlan) else None
    planned, position = (bound.upcoming, bound.position) if bound is not None else (None, 0)
    found = _run(pruner, model, planned, call) if torch.is_grad_enabled() else call()
    if bound is not None and bound.position == position:
        bound.skip()
    return found


def _run(pruner: Pruner, model: torch.nn.Module, planned: PlannedMicrobatch | None, call: Callable[[], Any]) -> Any:
    microbatch = _microbatch(pruner, model, planned)
    why = pruner.forbidden(microbatch) or pruner.unproved_stage()
    counting = Counting(pruner.meter, microbatch, dead=why is None)
    with counting.segment():
        output, loss_func = call() if why is not None else _run_dead(pruner, microbatch, model, call)
    if why is not None and counting.counted:
        pruner.meter.count_backward(microbatch.shape, output)
    pruner.note(microbatch, Dead(microbatch.known.reason) if why is None else why)
    return output, loss_func


def _microbatch(pruner: Pruner, model: torch.nn.Module, planned: PlannedMicrobatch | None) -> Microbatch:
    if planned is None:
        known = Known(False, "no plan is bound: plan.bind(None) is for a stage that reads no data")
    else:
        known = Known(planned.dead, planned.reason, planned)
    named = {f"input[{index}]": tensor for index, tensor in enumerate(pruner.schedule.stage_inputs(model))}
    if planned is not None:  # a first stage receives nothing that shows the size
        named["planned"] = torch.empty(len(planned.samples), planned.tokens, device="meta")
    return pruner.microbatch({"": model}, known, named)


def _run_dead(pruner: Pruner, microbatch: Microbatch, model: torch.nn.Module, call: Callable[[], Any]) -> Any:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    delivery = Delivery(parameters, functools.partial(pruner.guard.note, "boundary", microbatch.about))

    def compute(name: str, call_of_model: Call) -> Any:
        with pruner.schedule.dead_forward(model) as others, torch.no_grad(), same_kernels():
            output = call_of_model()
        delivery.also(others)
        return replace(output, {id(tensor): delivery.bound(tensor) for _, tensor in float_leaves(name, output)})

    with Boundary(trainable_modules(model), around=nullcontext, compute=compute).hooked():
        return call()
