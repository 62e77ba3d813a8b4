"""TRL's GRPOTrainer: one line before ``trainer.train()``. Tried with trl 1.16.0 and transformers 5.24.

Private names of TRL that it relies on: ``_compute_loss(model, inputs)`` and ``_generate_and_score_completions(inputs)``
of the trainer, which are replaced on this one trainer, and ``_metrics``.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOTrainer

from gradprune.errors import PruneError
from gradprune.facts import Live
from gradprune.planner import StepPlan
from gradprune.runtime.guard import OnViolation
from gradprune.step import PrunedStep, compile

#: A flag for each row, on the CPU, that travels with TRL's batches through its shuffling and splitting.
ROW_IS_ZERO = "gradprune_row_is_zero"

_FACTORS = ("advantages", "completion_mask")


def prune(
    trainer: GRPOTrainer,
    *,
    audit: float = 0.0,
    on_violation: OnViolation = "poison",
    strict: bool = False,
) -> PrunedStep:
    """Have `trainer` skip the backward of microbatches whose advantages are all zero; returns the step, to explain.

    Call it once, before ``trainer.train()``. Everything that TRL computes, logs and saves stays what it was; added is
    the metric ``gradprune/dead_share``, the share of microbatches that were pruned. The options are those of
    `gradprune.compile`. Raises PruneError for another kind of trainer, and for one that is pruned already.
    """
    if not isinstance(trainer, GRPOTrainer):
        raise PruneError(f"trainer is a {type(trainer).__name__}: pass a trl.GRPOTrainer")
    if isinstance(vars(trainer).get("_compute_loss"), _PrunedLoss):
        raise PruneError("this trainer is pruned already: call prune(trainer) once")
    step = compile(
        trainer._compute_loss, zero=" * ".join(_FACTORS), audit=audit, on_violation=on_violation, strict=strict
    )
    trainer._compute_loss = _PrunedLoss(trainer, step)
    trainer._generate_and_score_completions = _FlaggedRollout(trainer._generate_and_score_completions)
    return step


class _FlaggedRollout:
    """Scores completions and flags, where TRL itself waits for the device, the rows that have no policy gradient."""

    def __init__(self, generate_and_score: Any) -> None:
        self._generate_and_score = generate_and_score

    def __call__(self, inputs: Any) -> Any:
        output = self._generate_and_score(inputs)
        zero = output["advantages"] == 0
        zero = zero.reshape(len(zero), -1).all(1) | (output["completion_mask"] == 0).all(1)
        return {**output, ROW_IS_ZERO: zero.cpu()}


class _PrunedLoss:
    """``trainer._compute_loss``, pruned, with its share of dead microbatches among the trainer's metrics."""

    def __init__(self, trainer: GRPOTrainer, step: PrunedStep) -> None:
        self._trainer, self._step = trainer, step

    def __call__(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        batch = {key: value for key, value in inputs.items() if key != ROW_IS_ZERO}
        zero = inputs.get(ROW_IS_ZERO)
        if zero is None or inputs["advantages"].device.type == "cpu":
            loss = self._step(model, batch)
        else:
            loss = self._step(model, next(_plan(zero).bind([batch])))
        if model.training:
            dead = not isinstance(self._step.explain().decisions[-1].outcome, Live)
            self._trainer._metrics["train"]["gradprune/dead_share"].append(float(dead))
        return loss


def _plan(zero: torch.Tensor) -> StepPlan:
    return StepPlan.from_factors({"advantages * completion_mask": (~zero).float()}, [len(zero)])
