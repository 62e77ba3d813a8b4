"""What the CPU knows of the microbatch in hand: whether the hypothesis holds, who says so, what is left to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradprune.errors import PruneError, StalePlanError
from gradprune.facts import Hypothesis
from gradprune.planner import PlannedMicrobatch, any_current, planned
from gradprune.planning.rollout import zero_rows
from gradprune.runtime.guard import magnitude
from gradprune.trees import lookup


@dataclass(frozen=True)
class Known:
    """holds: the hypothesis is true of this microbatch, as far as the CPU can tell; `reason` says who says so.

    unchecked: factors on a device, aligned, whose product the device itself must find zero. checked: factors on the
    CPU, by name, whose product is zero.
    """

    holds: bool
    reason: str
    plan: PlannedMicrobatch | None = None
    unchecked: tuple[torch.Tensor, ...] = ()
    checked: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def still_holds(self) -> bool:
        """Whether the factors that were checked are as they were: NumPy writes to a tensor without a torch call."""
        return not self.checked or bool(zero_rows(self.checked).all())

    def residue(self) -> torch.Tensor | None:
        """Largest absolute value of the product of the factors, on their device; None if the CPU has checked it."""
        if not self.unchecked:
            return None
        product = self.unchecked[0]
        for factor in self.unchecked[1:]:
            product = product * factor
        return magnitude(product)


def examine(batch: Any, hypothesis: Hypothesis, *, allow_sync: bool) -> Known:
    """Decide from a bound plan, or from CPU tensors in the batch, whether the hypothesis holds.

    Raises PruneError for names that the batch does not have, factors that are no tensors or do not fit each other, NaN
    factors; StalePlanError where the plan says dead and tensors on the CPU say otherwise. Waits for a device only with
    `allow_sync`.
    """
    factors = {name: _factor(batch, name) for name in hypothesis.factors}
    return judge(factors, planned(batch), allow_sync=allow_sync)


def judge(factors: Mapping[str, torch.Tensor], plan: PlannedMicrobatch | None, *, allow_sync: bool) -> Known:
    """`examine` for factors in hand, by name, and what is planned for their microbatch."""
    factors = {name: tensor.reshape(1) if tensor.dim() == 0 else tensor for name, tensor in factors.items()}
    if plan is not None and not plan.dead:
        return Known(False, planned_live(plan), plan)
    devices = {str(tensor.device) for tensor in factors.values() if tensor.device.type != "cpu"}
    if devices and allow_sync and plan is None:
        factors, devices = {name: tensor.detach().cpu() for name, tensor in factors.items()}, set()
    if devices:
        return _on_device(factors, plan, ", ".join(sorted(devices)))
    return _on_cpu(factors, plan)


def planned_live(plan: PlannedMicrobatch) -> str:
    """Why a microbatch runs live that was planned so."""
    return f"planned live: {plan.reason}"


def _factor(batch: Any, name: str) -> torch.Tensor:
    value = lookup(batch, name)
    if not isinstance(value, torch.Tensor):
        raise PruneError(f"{name!r} in the batch is a {type(value).__name__}: zero= names tensors")
    return value


def _on_cpu(factors: dict[str, torch.Tensor], plan: PlannedMicrobatch | None) -> Known:
    product = " * ".join(factors)
    if any(tensor.numel() == 0 for tensor in factors.values()):
        return Known(False, "the microbatch is empty", plan)
    rows = zero_rows(factors)
    if rows.all():
        reason = plan.reason if plan else f"{product} == 0 at every position"
        return Known(True, reason, plan, checked=factors)
    if plan is None:
        return Known(False, f"{product} != 0 in row {int(rows.argmin())}")
    raise StalePlanError(
        f"microbatch {plan.index} is planned dead ({plan.reason}), but in the batch {product} != 0 in row "
        f"{int(rows.argmin())}: make the plan from the tensors that the loss receives, and bind "
        "the batches in the plan's order"
    )


def _on_device(factors: dict[str, torch.Tensor], plan: PlannedMicrobatch | None, where: str) -> Known:
    if plan is None:
        hint = "bind what reaches the step: plan.bind(map(to_device, batches))"
        other = f"a plan is bound, but not to this batch: {hint}" if any_current() else "no plan is bound"
        return Known(False, f"{', '.join(factors)} on {where}, which is not read: {other}")
    rank = max(tensor.dim() for tensor in factors.values())
    aligned = [tensor.detach().reshape(tensor.shape + (1,) * (rank - tensor.dim())) for tensor in factors.values()]
    try:
        torch.broadcast_shapes(*(tensor.shape for tensor in aligned))
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in factors.items())
        raise PruneError(f"factors of one product must agree in their leading dimensions: {shapes}") from error
    on_device = [tensor for tensor in aligned if tensor.device.type != "cpu"]
    unchecked = aligned if len(on_device) == len(aligned) else on_device
    return Known(True, plan.reason, plan, tuple(unchecked))
