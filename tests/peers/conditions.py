"""Which side conditions of a proof a run breaks: found by running the loss on real values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradprune.calls import CallRecorder, function_name, is_computation, user_line
from gradprune.facts import Condition
from gradprune.joint import Call
from tests.peers.truth import Batch, gradient


class CallResults(CallRecorder):
    """A CallRecorder that keeps what each call gave, under the call's index."""

    def __init__(self, leaves: dict[str, torch.Tensor]) -> None:
        super().__init__(leaves)
        self.results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands, where = self.operands(args, kwargs), user_line(sys._getframe(1))
        result = func(*args, **kwargs)
        if is_computation(func, result):
            self.calls.append(Call(function_name(func), operands, where))
            self.results.append(result)
            self.number_results(result)
        return result


def broken(conditions: Sequence[Condition], loss: Callable[..., torch.Tensor], batch: Batch) -> tuple[Condition, ...]:
    """The conditions that do not hold when `loss` runs on `batch`.

    One that speaks of a value of the backward is broken where the gradient is not finite: that is how it is checked.
    One of another data-dependent path than the run's is not broken.
    """
    run = CallResults(dict(zip(("logp", "old", "adv", "mask", "ref"), batch.args())))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), run:
        loss(*batch.args())
    with torch.compiler.set_stance("force_eager"):
        finite = bool(gradient(loss, batch).isfinite().all())
    return tuple(condition for condition in conditions if not _holds(condition, run, finite))


def _holds(condition: Condition, run: CallResults, finite_gradient: bool) -> bool:
    if condition.call is None:
        return finite_gradient
    if condition.call >= len(run.calls) or run.calls[condition.call].where != condition.where:
        return True
    value = run.results[condition.call]
    tensors = [value] if isinstance(value, torch.Tensor) else [item for item in value if isinstance(item, torch.Tensor)]
    checks = {
        "finite": lambda tensor: tensor.isfinite().all(),
        "notnan": lambda tensor: ~tensor.isnan().any(),
        "nonzero": lambda tensor: (tensor != 0).all(),
        "nonempty": lambda tensor: torch.tensor(tensor.numel() > 0),
    }
    return all(bool(checks[condition.kind](tensor)) for tensor in tensors)
