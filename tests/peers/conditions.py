"""Which side conditions of a proof a run breaks: found by running the loss on real values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradprune.calls import CallRecorder
from gradprune.facts import Condition
from tests.peers.truth import Batch, gradient


class CallResults(CallRecorder):
    """A CallRecorder that keeps what each call gave, under the call's index."""

    def __init__(self, leaves: dict[str, torch.Tensor]) -> None:
        super().__init__(leaves, lines=True)
        self.results: list[Any] = []

    def record(self, func: Any, operands: tuple[tuple[Any, ...], ...], where: Any, result: Any) -> None:
        super().record(func, operands, where, result)
        self.results += [result] * (len(self.calls) - len(self.results))


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
    if condition.call is None or condition.inside:
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
