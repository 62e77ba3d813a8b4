"""What pruning a recorded rollout would save, before anything is changed in a trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradprune.errors import PlanError
from gradprune.planner import StepPlan
from gradprune.planning.rollout import read_whole


@dataclass(frozen=True)
class Estimate:
    """Shares between 0 and 1. Times are of the slowest rank, in forward tokens; `bound` is the least possible."""

    sequences: int
    tokens: int
    dead_groups: float
    dead_tokens: float
    dead_tokens_put_together: float
    unpruned: float
    pruned: float
    bound: float

    @property
    def saving(self) -> float:
        return 1 - self.pruned / self.unpruned

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "saving": self.saving}

    def __str__(self) -> str:
        return "\n".join(
            [
                f"sequences        {self.sequences} ({self.tokens} tokens)",
                f"dead groups      {self.dead_groups:.1%}",
                f"dead tokens      {self.dead_tokens:.1%}, {self.dead_tokens_put_together:.1%} in dead microbatches",
                f"slowest rank     {self.unpruned:.0f} -> {self.pruned:.0f} forward tokens (at least {self.bound:.0f})",
                f"saving           {self.saving:.1%} of its forward and backward",
            ]
        )


def read_rollout(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON lines file. Raises PlanError that names the line of a bad one."""
    if not path.is_file():
        raise PlanError(f"{path} does not exist: pass a file with one JSON record a sequence")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(record, dict) or "length" not in record or not {"advantage", "reward"} & record.keys():
            raise PlanError(f"{path}:{number}: each record needs length, and advantage or reward")
        records.append(record)
    if not records:
        raise PlanError(f"{path} holds no record: write one JSON record a sequence")
    return records


def estimate_rollout(
    records: Sequence[Mapping[str, Any]], group_size: int, token_budget: int, ranks: int, recompute: bool
) -> Estimate:
    """Plan the rollout twice, with its zeros and as if nothing were dead, and compare the slowest ranks.

    Advantages are read from the records, or are rewards minus their group's mean, exact zero in a uniform group.
    Raises PlanError for ragged groups and sequences beyond the budget.
    """
    group_size = read_whole("group_size", group_size)
    lengths = np.asarray([record["length"] for record in records])
    advantages = _advantages(records, group_size)
    options: dict[str, Any] = {"token_budget": token_budget, "ranks": ranks, "recompute": recompute}
    plan = StepPlan.build(lengths, advantages, group_size=group_size, **options)
    unpruned = StepPlan.build(lengths, np.ones(len(lengths)), **options)
    assert plan.balance is not None and unpruned.balance is not None
    dead_rows = advantages == 0
    return Estimate(
        sequences=len(records),
        tokens=int(lengths.sum()),
        dead_groups=float(dead_rows.reshape(-1, group_size).all(axis=1).mean()),
        dead_tokens=float(lengths[dead_rows].sum() / lengths.sum()),
        dead_tokens_put_together=plan.dead_tokens / plan.tokens,
        unpruned=unpruned.balance.slowest,
        pruned=plan.balance.slowest,
        bound=plan.balance.bound,
    )


def _advantages(records: Sequence[Mapping[str, Any]], group_size: int) -> np.ndarray:
    if all("advantage" in record for record in records):
        return np.asarray([record["advantage"] for record in records], dtype=np.float64)
    without = next((number for number, record in enumerate(records) if "reward" not in record), None)
    if without is not None:
        raise PlanError(f"record {without} has an advantage and no reward, others have none: pass one of them in all")
    if len(records) % group_size:
        raise PlanError(f"the rollout has {len(records)} sequences, group_size is {group_size}: pass whole groups")
    rewards = np.asarray([record["reward"] for record in records], dtype=np.float64).reshape(-1, group_size)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    centred[rewards.max(axis=1) == rewards.min(axis=1)] = 0
    return centred.reshape(-1)
