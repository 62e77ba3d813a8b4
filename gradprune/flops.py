"""FLOP accounts: what a training step ran, what it did not have to run, and which utilisation it may claim.

A report is plain data: reading, adding and storing it needs no torch. `gradprune.counting.meter` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gradprune.errors import PruneError


@dataclass(frozen=True)
class Phases:
    """FLOPs by phase. recompute: forward operators run again in the backward (activation checkpointing)."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute

    def __add__(self, other: Phases) -> Phases:
        return Phases(self.forward + other.forward, self.backward + other.backward, self.recompute + other.recompute)

    def scale(self, times: int) -> Phases:
        return Phases(self.forward * times, self.backward * times, self.recompute * times)


@dataclass(frozen=True)
class FlopReport:
    """FLOPs of some microbatches, of any number of steps and ranks; add reports with ``+`` or ``sum``.

    A FLOP is one multiplication or addition of a matrix product, attention or convolution as
    `torch.utils.flop_counter` counts them: masked positions of an attention kernel count as the kernel's shapes say,
    elementwise operators count nothing.

    total: FLOPs of the unpruned step, counted per microbatch and not as the sum below, which it must equal.
    live_run, live_pruned, dead_run, dead_pruned: the same by kind of microbatch, by what happened, by phase.
    tokens_*: real tokens; padding_*: slots that the microbatch's tensors hold beyond these.
    fillers: microbatches that hold no sample and exist to keep ranks in step; part of ``microbatches_dead``, or of
        ``microbatches_live`` where another rank's microbatch at the same index is live.
    estimated: the part of `total` that was neither counted nor derived exactly.
    uncounted: microbatches of which no FLOP count was possible; they add nothing to `total`.
    """

    total: int = 0
    live_run: Phases = field(default_factory=Phases)
    live_pruned: Phases = field(default_factory=Phases)
    dead_run: Phases = field(default_factory=Phases)
    dead_pruned: Phases = field(default_factory=Phases)
    microbatches_live: int = 0
    microbatches_dead: int = 0
    tokens_live: int = 0
    tokens_dead: int = 0
    padding_live: int = 0
    padding_dead: int = 0
    fillers: int = 0
    estimated: int = 0
    uncounted: int = 0

    def __post_init__(self) -> None:
        if self.total != self.run.total + self.pruned.total:
            raise PruneError(
                f"FLOPs do not add up: total {self.total} != run {self.run.total} + pruned {self.pruned.total}: "
                "build reports with FlopMeter.report() and add them with '+'"
            )

    @property
    def run(self) -> Phases:
        return self.live_run + self.dead_run

    @property
    def pruned(self) -> Phases:
        return self.live_pruned + self.dead_pruned

    @property
    def hardware_flops(self) -> int:
        """FLOPs that the device executed, recomputation included."""
        return self.run.total

    @property
    def model_flops(self) -> int:
        """FLOPs that the device executed, recomputation left out."""
        return self.run.forward + self.run.backward

    @property
    def claimed_model_flops(self) -> int:
        """`model_flops` of one who does not know that the dead part never ran."""
        return self.model_flops + self.pruned.forward + self.pruned.backward

    def mfu(self, seconds: float, peak: float) -> float:
        """`model_flops` over what `seconds` at `peak` FLOP/s allow; for several ranks, `peak` is that of all."""
        return self.model_flops / _capacity(seconds, peak)

    def hfu(self, seconds: float, peak: float) -> float:
        """`hardware_flops` over what `seconds` at `peak` FLOP/s allow."""
        return self.hardware_flops / _capacity(seconds, peak)

    def claimed_mfu(self, seconds: float, peak: float) -> float:
        """The MFU that would have been claimed without correction: pruned work counted as if it had run."""
        return self.claimed_model_flops / _capacity(seconds, peak)

    def __add__(self, other: FlopReport) -> FlopReport:
        if not isinstance(other, FlopReport):
            return NotImplemented
        sums: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return FlopReport(**sums)

    def __radd__(self, other: object) -> FlopReport:
        return self if other == 0 else NotImplemented

    def metrics(self, prefix: str = "", *, seconds: float | None = None, peak: float | None = None) -> dict[str, float]:
        """A flat dict for any logger: the same keys on every rank and at every step.

        ``flops/run`` is `hardware_flops`. FLOPs, counts and shares always have values; ``mfu``, ``hfu`` and
        ``mfu_claimed`` are NaN without `seconds` and `peak` (FLOP/s).
        """
        values: dict[str, float] = {"flops/total": self.total, "flops/estimated": self.estimated}
        for kind in ("live", "dead"):
            for fate in ("run", "pruned"):
                phases: Phases = getattr(self, f"{kind}_{fate}")
                values |= {f"flops/{kind}/{fate}/{phase}": value for phase, value in asdict(phases).items()}
            for count in ("microbatches", "tokens", "padding"):
                values[f"{count}/{kind}"] = getattr(self, f"{count}_{kind}")
        values |= {"microbatches/fillers": self.fillers, "microbatches/uncounted": self.uncounted}
        values |= {"flops/run": self.run.total, "flops/pruned": self.pruned.total}
        values |= {"flops/model": self.model_flops, "flops/model_claimed": self.claimed_model_flops}
        values["flops/pruned_share"] = self.pruned.total / self.total if self.total else 0.0
        tokens = self.tokens_live + self.tokens_dead
        values["tokens/dead_share"] = self.tokens_dead / tokens if tokens else 0.0
        timed = seconds is not None and peak is not None
        for name, rate in (("mfu", self.mfu), ("hfu", self.hfu), ("mfu_claimed", self.claimed_mfu)):
            values[name] = rate(seconds, peak) if timed else math.nan  # type: ignore[arg-type]
        return {f"{prefix}{name}": float(value) for name, value in values.items()}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FlopReport:
        """The inverse of `to_json`. Raises TypeError on data of another shape, PruneError where it does not add up."""
        values: dict[str, Any] = dict(data)
        for name, value in data.items():
            if isinstance(value, Mapping):
                values[name] = Phases(**value)
        return cls(**values)

    def __str__(self) -> str:
        share = self.pruned.total / self.total if self.total else 0.0
        lines = [
            *_align(self._rows()),
            f"pruned {share:.1%} of all FLOPs",
            f"live  {self.microbatches_live} microbatches, {self.tokens_live} tokens, {self.padding_live} padding",
            f"dead  {self.microbatches_dead} microbatches, {self.tokens_dead} tokens, {self.padding_dead} padding",
        ]
        if self.fillers:
            lines.append(f"{self.fillers} of these microbatches are fillers, without a sample")
        if self.estimated:
            lines.append(f"{format_flops(self.estimated)} are estimates: no live microbatch of that kind was counted")
        if self.uncounted:
            lines.append(f"{self.uncounted} microbatches could not be counted and are missing here")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("FLOPs", "run", "pruned", "total")]
        for kind in ("live", "dead"):
            run, pruned = getattr(self, f"{kind}_run"), getattr(self, f"{kind}_pruned")
            for phase in ("forward", "backward", "recompute"):
                ran, saved = getattr(run, phase), getattr(pruned, phase)
                rows.append((f"{kind} {phase}", *map(format_flops, (ran, saved, ran + saved))))
        return [*rows, ("all", *map(format_flops, (self.run.total, self.pruned.total, self.total)))]


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def _capacity(seconds: float, peak: float) -> float:
    if not (seconds > 0 and peak > 0):
        raise PruneError(
            f"seconds is {seconds} and peak is {peak}: pass a measured time and a peak in FLOP/s, both > 0"
        )
    return seconds * peak


def format_flops(flops: float) -> str:
    """``1234567`` -> ``"1.235 M"``; exact below 1000."""
    if flops < 1000:
        return f"{flops:.0f}  "
    exponent = min(int(math.log10(flops)) // 3, 6)
    return f"{flops / 1000**exponent:.3f} {' kMGTPE'[exponent]}"
