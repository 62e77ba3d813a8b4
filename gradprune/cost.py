"""What a sequence costs: FLOPs of forward, backward and recomputation as polynomials of its length.

Three ways to them: the closed form of a decoder's configuration, the symbolic count of a traced graph, or a few counted
steps. `calibrate` turns FLOPs into seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import sympy

from gradprune.counting.decoder_shape import DecoderShape, projections, with_adapters
from gradprune.errors import PruneError
from gradprune.flops import Phases
from gradprune.planning.rollout import read_lengths

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LengthCost:
    """FLOPs of one sequence of n tokens: ``constant + linear n + quadratic n^2``."""

    constant: int = 0
    linear: int = 0
    quadratic: int = 0

    @classmethod
    def from_expression(cls, expression: sympy.Expr, length: str) -> LengthCost:
        """From a sympy expression whose only symbol is named `length`. Raises PruneError for anything but a quadratic
        polynomial with whole coefficients."""
        expression = sympy.sympify(expression)
        names = sorted(symbol.name for symbol in expression.free_symbols)
        if set(names) - {length}:
            raise PruneError(f"cost depends on {', '.join(names)}: give a size to all but {length!r}")
        symbol = next(iter(expression.free_symbols), sympy.Symbol(length))
        terms = sympy.Poly(expression, symbol).as_dict() if expression.is_polynomial(symbol) else {(3,): 1}
        if any(power > 2 or value != int(value) for (power,), value in terms.items()):
            raise PruneError(f"cost {expression} is no quadratic polynomial of {length!r} with whole coefficients")
        return cls(*(int(terms.get((power,), 0)) for power in range(3)))

    def __call__(self, lengths: npt.ArrayLike) -> Floats:
        """FLOPs of each sequence, float64, exact below 2^53."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.constant + tokens * (self.linear + tokens * self.quadratic)

    def total(self, lengths: Sequence[int]) -> int:
        """FLOPs of all sequences, exact at any size."""
        return sum(self.constant + n * (self.linear + n * self.quadratic) for n in map(int, lengths))


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence by phase. As a callable: lengths -> FLOPs of the forward, as `StepPlan.build` wants it."""

    forward: LengthCost
    backward: LengthCost
    recompute: LengthCost = LengthCost()

    def __call__(self, lengths: npt.ArrayLike) -> Floats:
        return self.forward(lengths)

    def whole(self, lengths: npt.ArrayLike) -> Floats:
        """FLOPs of forward, backward and recomputation of each sequence."""
        return self.forward(lengths) + self.backward(lengths) + self.recompute(lengths)

    def phases(self, lengths: Sequence[int]) -> Phases:
        """Exact FLOPs of these sequences together. For a padded microbatch give each row its padded length.

        Raises PruneError for a length that is no whole number of at least 1.
        """
        known = read_lengths(lengths).tolist() if len(lengths) else []
        return Phases(*(cost.total(known) for cost in (self.forward, self.backward, self.recompute)))

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        vocab: int | None = None,
        fused_attention: bool = True,
        checkpointing: Literal["none", "full"] = "none",
        lora_rank: int = 0,
    ) -> CostModel:
        """Closed form of a decoder from a Hugging Face or Megatron config or a `DecoderShape`: see `DecoderShape.read`.

        Attention is counted dense, as its kernels' shapes say. fused_attention: its backward makes the scores again,
        2.5 forwards instead of 2. checkpointing: ``full`` runs all operators of each block again. lora_rank: low-rank
        updates of every projection but router and head, all else frozen; 0 trains everything.
        """
        if checkpointing not in ("none", "full"):
            raise PruneError(f"checkpointing is {checkpointing!r}: pass 'none' or 'full'")
        if not isinstance(lora_rank, int) or lora_rank < 0:
            raise PruneError(f"lora_rank is {lora_rank!r}: pass a whole number, 0 to train everything")
        shape = DecoderShape.read(config, vocab)
        maps = [part for item in projections(shape) for part in with_adapters(item, lora_rank)]
        blocks = sum(part.flops for part in maps if part.place != "head")
        head = sum(part.flops for part in maps if part.place == "head")
        scores = 4 * shape.layers * shape.heads * shape.head_dim
        return cls(
            LengthCost(linear=blocks + head, quadratic=scores),
            LengthCost(
                linear=sum(part.flops * part.gradients for part in maps),
                quadratic=scores * 5 // 2 if fused_attention else scores * 2,
            ),
            LengthCost(linear=blocks, quadratic=scores) if checkpointing == "full" else LengthCost(),
        )

    @classmethod
    def from_expressions(
        cls, length: str, phases: Sequence[sympy.Expr], sizes: Mapping[str, int] | None = None
    ) -> CostModel:
        """From symbolic counts of one sequence: forward, backward and, if any, recomputation, as
        `gradprune.passes.count_flops` gives them. `sizes` are put in by symbol name; `length` alone must remain. A
        sequence attends to itself: ``squares(offsets)`` and ``pairs(q, k)`` become its squared length."""
        known = {name: size for name, size in (sizes or {}).items() if name != length}
        return cls(*(LengthCost.from_expression(_substitute(phase, known, length), length) for phase in phases))

    @classmethod
    def from_counts(cls, counts: Mapping[int, Phases]) -> CostModel:
        """From FLOPs counted at four lengths or more; the fourth checks the fit of three.

        Raises PruneError where the counts are no polynomial of the length.
        """
        if len(counts) < 4:
            raise PruneError(f"FLOPs are counted at {len(counts)} lengths: count at 4, three to fit and one to check")
        symbol = sympy.Symbol("length")

        def fit(phase: str) -> LengthCost:
            points = [(length, getattr(phases, phase)) for length, phases in counts.items()]
            return LengthCost.from_expression(sympy.interpolate(points, symbol), symbol.name)

        return cls(fit("forward"), fit("backward"), fit("recompute"))

    @classmethod
    def derive(
        cls,
        step: Callable[[Any, Any], Any],
        model: Any,
        make_batch: Callable[[int], Any],
        lengths: Sequence[int] = (8, 16, 24, 40),
    ) -> CostModel:
        """Counts ``step(model, make_batch(length))``, forward and backward, where the batch holds one sequence.

        Whatever the step does is in it: frozen weights, checkpointing, adapters, heads. Gradients and the CPU's random
        state are restored; buffers that a forward updates are not. A model on the meta device costs no memory.
        """
        from gradprune.counting.counted_steps import count_step  # torch is needed here only

        return cls.from_counts({length: count_step(step, model, make_batch(length)) for length in lengths})

    def calibrate(self, first: Timing, second: Timing) -> TimedCost:
        """Two timed microbatches -> seconds per FLOP and per token.

        Raises PruneError where the two do not tell these apart.
        """
        rows = [(Fraction(t.flops(self)), Fraction(sum(t.lengths)), Fraction(t.seconds)) for t in (first, second)]
        (flops_a, tokens_a, seconds_a), (flops_b, tokens_b, seconds_b) = rows
        determinant = flops_a * tokens_b - flops_b * tokens_a
        if not determinant:
            raise PruneError(
                "both microbatches have equal FLOPs per token: time one of short and one of long sequences"
            )
        per_flop = float((seconds_a * tokens_b - seconds_b * tokens_a) / determinant)
        per_token = float((flops_a * seconds_b - flops_b * seconds_a) / determinant)
        if per_flop <= 0 or per_token < 0:
            raise PruneError(
                f"the timings mean {per_flop:.3g} s per FLOP and {per_token:.3g} s per token: repeat them warm, with "
                "lengths further apart"
            )
        return TimedCost(self, per_flop, per_token)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        """The inverse of `to_json`. Raises TypeError on data of another shape."""
        return cls(**{phase: LengthCost(**value) for phase, value in data.items()})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def _substitute(expression: sympy.Expr, sizes: Mapping[str, int], length: str) -> sympy.Expr:
    expression = sympy.sympify(expression)
    tokens = next((s for s in expression.free_symbols if s.name == length), sympy.Symbol(length))
    values = {symbol: sizes.get(symbol.name, symbol) for symbol in expression.free_symbols}
    squares = {
        symbol: tokens**2
        for symbol, value in values.items()
        if value is symbol and symbol.name.startswith(("squares(", "pairs("))
    }
    return expression.subs(values | squares)


@dataclass(frozen=True)
class Timing:
    """A timed microbatch: the lengths of its sequences, its seconds, and whether it ran its forward only.

    Raises PruneError for lengths that are none and seconds that nothing takes.
    """

    lengths: tuple[int, ...]
    seconds: float
    dead: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(read_lengths(self.lengths).tolist()))
        if not (isinstance(self.seconds, (int, float, np.floating)) and 0 < self.seconds < math.inf):
            raise PruneError(f"seconds is {self.seconds!r}: pass a measured time > 0")
        object.__setattr__(self, "seconds", float(self.seconds))

    def flops(self, cost: CostModel) -> int:
        phases = cost.phases(self.lengths)
        return phases.forward if self.dead else phases.total


@dataclass(frozen=True)
class TimedCost:
    """A calibrated cost. As a callable: lengths -> seconds of each forward; also a cost for `StepPlan.build`."""

    cost: CostModel
    seconds_per_flop: float
    seconds_per_token: float

    def __call__(self, lengths: npt.ArrayLike) -> Floats:
        return self.seconds(lengths, dead=True)

    def seconds(self, lengths: npt.ArrayLike, *, dead: bool = False) -> Floats:
        """Seconds of each sequence: forward only if `dead`, else all phases."""
        flops = self.cost(lengths) if dead else self.cost.whole(lengths)
        return flops * self.seconds_per_flop + np.asarray(lengths, dtype=np.float64) * self.seconds_per_token

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TimedCost:
        """The inverse of `to_json`. Raises TypeError or KeyError on data of another shape."""
        return cls(**{**data, "cost": CostModel.from_json(data["cost"])})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TimedCost:
        return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
