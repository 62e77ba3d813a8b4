"""What a plan must keep to, and what it moves: the limits of a trainer, and items. Data and their checks only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from gradprune.errors import PlanError
from gradprune.planning.balance import Floats, Ints
from gradprune.planning.rollout import LARGEST, read_whole

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Limits:
    """What a trainer demands of a plan.

    ranks: data-parallel ranks. token_budget: tokens of a microbatch at most, on each context-parallel rank; None only
        with microbatch_size. dead_token_budget: the same for dead microbatches; by default token_budget.
    microbatch_size: sequences in every microbatch. num_microbatches: microbatches of every rank. multiple_of: the
        number of microbatches of a rank is a multiple of this (virtual pipelines).
    lockstep: collectives in forward or backward need all ranks at the same microbatch: equal counts, dead ones at the
        same indices on every rank.
    padded: a microbatch is a rectangle, rows times its longest sequence. context_parallel: the budget holds this many
        times as many tokens, and sequences are padded to a multiple of twice this.
    recompute: the forward of a live microbatch runs twice. reuse_forward: a dead one's forward is not run at all.
    """

    ranks: int
    token_budget: int | None
    dead_token_budget: int | None = None
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    multiple_of: int = 1
    lockstep: bool = False
    padded: bool = False
    context_parallel: int = 1
    recompute: bool = False
    reuse_forward: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "multiple_of", "context_parallel"):
            object.__setattr__(self, name, read_whole(name, getattr(self, name)))
        for name in ("token_budget", "dead_token_budget", "microbatch_size", "num_microbatches"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, read_whole(name, value, 2**53 if "budget" in name else LARGEST))
        if self.token_budget is None and self.microbatch_size is None:
            raise PlanError("neither token_budget nor microbatch_size was passed: one must bound a microbatch")
        if self.num_microbatches and self.num_microbatches % self.multiple_of:
            raise PlanError(
                f"num_microbatches is {self.num_microbatches}, multiple_of is {self.multiple_of}: pass a multiple of it"
            )

    @property
    def quantum(self) -> int:
        """Sequences are padded to a multiple of this many tokens."""
        return 1 if self.context_parallel == 1 else 2 * self.context_parallel

    def budget(self, dead: bool) -> float:
        """Tokens of a microbatch at most, over its context-parallel ranks together."""
        tokens = self.dead_token_budget if dead and self.dead_token_budget is not None else self.token_budget
        return np.inf if tokens is None else float(tokens * self.context_parallel)

    def budget_name(self, dead: bool) -> str:
        name = "dead_token_budget" if dead and self.dead_token_budget is not None else "token_budget"
        return name if self.context_parallel == 1 else f"{name} * context_parallel"

    def passes(self, dead: Any) -> Floats:
        """Time in forwards: a backward is two, and `recompute` one more."""
        return np.where(dead, 0.0 if self.reuse_forward else 1.0, 4.0 if self.recompute else 3.0)


@dataclass(frozen=True)
class Items:
    """What moves as one: sequences, groups kept whole, or microbatches made before. Arrays of one length.

    tokens: as the budget counts them. rows: sequences. width: tokens of the longest sequence. cost: of the forward.
    real: tokens without padding. first: the first sequence, as its index in the rollout.
    """

    tokens: Ints
    rows: Ints
    width: Ints
    cost: Floats
    dead: Bools
    real: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, which: Any) -> Items:
        return Items(*(getattr(self, item.name)[which] for item in fields(self)))

    def merge(self, into: Ints, count: int, padded: bool) -> Items:
        """The items of each of `count` parts as one item; dead where all are. `into` [items]: no part is empty."""
        order = np.argsort(into, kind="stable")
        start = np.searchsorted(into[order], np.arange(count))
        rows, width = np.add.reduceat(self.rows[order], start), np.maximum.reduceat(self.width[order], start)
        dead, real = np.logical_and.reduceat(self.dead[order], start), np.add.reduceat(self.real[order], start)
        first = np.minimum.reduceat(self.first[order], start)
        if padded:
            cost = rows * np.maximum.reduceat((self.cost / self.rows)[order], start)
            return Items(rows * width, rows, width, cost, dead, real, first)
        tokens, cost = np.add.reduceat(self.tokens[order], start), np.add.reduceat(self.cost[order], start)
        return Items(tokens, rows, width, cost, dead, real, first)


def check_fit(items: Items, limits: Limits) -> None:
    """Raises PlanError naming the first item that no microbatch can hold."""
    room = np.where(items.dead, limits.budget(True), limits.budget(False))
    large = np.flatnonzero(items.tokens > room)
    if large.size:
        item = int(large[0])
        what = f"sequence {items.first[item]}"
        if items.rows[item] > 1:
            what = f"the group of {what}, {items.rows[item]} sequences,"
        raise PlanError(
            f"{what} has {items.tokens[item]} tokens, {limits.budget_name(bool(items.dead[item]))} is "
            f"{int(room[item])}: pass a larger one, or cut the sequence before its advantages are computed"
        )
