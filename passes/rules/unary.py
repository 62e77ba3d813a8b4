"""Elementwise functions of one operand, as a table: what they make of exact numbers and bounds, where NaN is born."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gradprune.passes.domain import Known, Number, Reach
from gradprune.passes.flow import Flow, Node, Value
from gradprune.passes.intervals import ANY, Interval, is_finite, magnitude
from gradprune.passes.registry import rule
from gradprune.passes.transfer import dtype_of, operands, pointwise

INF: Final = math.inf
NONNEGATIVE: Final = (0.0, INF)
Exactly = Mapping[float, Number] | Callable[[float], Number | None]


@dataclass(frozen=True)
class Elementwise:
    """at: the results at arguments where they are exact. increasing: a monotone function for bounds. range: of results.

    domain: arguments, infinities included, for which the result is not NaN. None: nowhere certain.
    """

    at: Exactly
    increasing: Callable[[float], float] | None = None
    range: Interval = ANY
    domain: Interval | None = ANY


def _guarded(function: Callable[[float], float]) -> Callable[[float], float]:
    def evaluate(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return INF
        except ValueError:
            return -INF

    return evaluate


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _rounded_by(function: Callable[[float], int]) -> Callable[[float], Number]:
    return lambda x: x if math.isinf(x) else function(x)


BETWEEN_ONES: Final = (-1.0, 1.0)
FINITE_ONLY: Final = (-1.7e308, 1.7e308)

FUNCTIONS: Final[Mapping[str, Elementwise]] = {
    "exp": Elementwise({0: 1, -INF: 0, INF: INF}, _guarded(math.exp), NONNEGATIVE),
    "exp2": Elementwise({0: 1, -INF: 0, INF: INF}, _guarded(lambda x: 2.0**x), NONNEGATIVE),
    "expm1": Elementwise({0: 0, -INF: -1, INF: INF}, _guarded(math.expm1), (-1.0, INF)),
    "log": Elementwise({1: 0, INF: INF, 0: -INF}, _guarded(math.log), domain=NONNEGATIVE),
    "log2": Elementwise({1: 0, INF: INF, 0: -INF}, _guarded(math.log2), domain=NONNEGATIVE),
    "log10": Elementwise({1: 0, INF: INF, 0: -INF}, _guarded(math.log10), domain=NONNEGATIVE),
    "log1p": Elementwise({0: 0, INF: INF, -1: -INF}, _guarded(math.log1p), domain=(-1.0, INF)),
    "sqrt": Elementwise({0: 0, 1: 1, INF: INF}, _guarded(math.sqrt), NONNEGATIVE, domain=NONNEGATIVE),
    "abs": Elementwise(abs, range=NONNEGATIVE),
    "sign": Elementwise(lambda x: (x > 0) - (x < 0), range=BETWEEN_ONES),
    "sgn": Elementwise(lambda x: (x > 0) - (x < 0), range=BETWEEN_ONES),
    "sin": Elementwise({0: 0}, range=BETWEEN_ONES, domain=FINITE_ONLY),
    "cos": Elementwise({0: 1}, range=BETWEEN_ONES, domain=FINITE_ONLY),
    "tan": Elementwise({0: 0}, domain=None),
    "asin": Elementwise({0: 0}, domain=BETWEEN_ONES),
    "acos": Elementwise({1: 0}, domain=BETWEEN_ONES),
    "atan": Elementwise({0: 0}, range=(-1.6, 1.6)),
    "sinh": Elementwise({0: 0, INF: INF, -INF: -INF}),
    "cosh": Elementwise({0: 1, INF: INF, -INF: INF}, range=NONNEGATIVE),
    "tanh": Elementwise({0: 0, INF: 1, -INF: -1}, math.tanh, BETWEEN_ONES),
    "asinh": Elementwise({0: 0, INF: INF, -INF: -INF}),
    "acosh": Elementwise({1: 0}, domain=None),
    "atanh": Elementwise({0: 0}, domain=None),
    "erf": Elementwise({0: 0, INF: 1, -INF: -1}, math.erf, BETWEEN_ONES),
    "erfc": Elementwise({0: 1, INF: 0, -INF: 2}, range=(0.0, 2.0)),
    "erfinv": Elementwise({0: 0}, domain=None),
    "lgamma": Elementwise({1: 0, 2: 0}, domain=None),
    "sinc": Elementwise({0: 1}, domain=None),
    "special_entr": Elementwise({0: 0, 1: 0}, domain=NONNEGATIVE),
    "special_log_ndtr": Elementwise({}, domain=None),
    "sigmoid": Elementwise({0: 0.5, INF: 1, -INF: 0}, _sigmoid, (0.0, 1.0)),
    "logit": Elementwise({0.5: 0}, domain=None),
    "relu": Elementwise(lambda x: max(x, 0), lambda x: max(x, 0.0), NONNEGATIVE),
    "gelu": Elementwise({0: 0}, domain=None),
    "silu": Elementwise({0: 0}, domain=None),
    "mish": Elementwise({0: 0}, domain=None),
    "hardswish": Elementwise({0: 0}, domain=None),
    "hardsigmoid": Elementwise({0: 0.5}, range=(0.0, 1.0)),
    "softplus": Elementwise({}, domain=None),
    "elu": Elementwise({0: 0}, domain=None),
    "celu": Elementwise({0: 0}, domain=None),
    "leaky_relu": Elementwise({0: 0}, domain=None),
    "softshrink": Elementwise({0: 0}, domain=None),
    "hardshrink": Elementwise({0: 0}, domain=None),
    "floor": Elementwise(_rounded_by(math.floor), _rounded_by(math.floor)),
    "ceil": Elementwise(_rounded_by(math.ceil), _rounded_by(math.ceil)),
    "trunc": Elementwise(_rounded_by(math.trunc), _rounded_by(math.trunc)),
    "round": Elementwise(_rounded_by(round), _rounded_by(round)),
    "frac": Elementwise({0: 0}, range=BETWEEN_ONES, domain=FINITE_ONLY),
    "deg2rad": Elementwise({0: 0}, domain=None),
    "rad2deg": Elementwise({0: 0}, domain=None),
    "digamma": Elementwise({}, domain=None),
}
_EXACT_BOUNDS: Final = frozenset({"relu", "floor", "ceil", "trunc", "round"})


def _names() -> list[str]:
    return [f"aten.{name}.default" for name in FUNCTIONS]


@rule(*_names(), "math.exp", "math.log", "math.sqrt", "math.floor", "math.ceil", "math.trunc", "torch.sym_sqrt")
def elementwise(flow: Flow, node: Node, a: Any, *settings: Any, **_: Any) -> Value | None:
    """Finite settings (a slope, an approximation) leave the results of the table as they are."""
    if any(isinstance(setting, float) and not math.isfinite(setting) for setting in settings):
        return None
    name = _table_name(node)
    function = FUNCTIONS[name]
    (x,) = operands(flow, dtype_of(node), a)
    at = function.at if callable(function.at) else function.at.get
    domain = function.domain
    inside = domain is not None and domain[0] <= x.bounds[0] and x.bounds[1] <= domain[1]
    bounds = _bounds(name, function, x.bounds)
    return pointwise(
        node,
        [x],
        lambda p: _at(at, p),
        bounds=bounds,
        notnan=x.notnan and inside,
        reach=_reach(flow, node, a, bounds, inside),
    )


def _table_name(node: Node) -> str:
    name = str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", ""))
    return name.removeprefix("sym_")


def _at(at: Callable[[float], Number | None], known: Known | None) -> Known | None:
    result = at(known.value) if known is not None else None
    return Known(result, known.needs) if known is not None and result is not None else None


def _bounds(name: str, function: Elementwise, argument: Interval) -> Interval:
    low, high = function.range
    if name == "abs":
        return (0.0, magnitude(argument))
    if function.increasing is None:
        return (low, high)
    ends = [function.increasing(end) for end in argument]
    slack = 0.0 if name in _EXACT_BOUNDS else 2.0**-8
    least = ends[0] - slack * abs(ends[0]) if math.isfinite(ends[0]) else ends[0]
    most = ends[1] + slack * abs(ends[1]) if math.isfinite(ends[1]) else ends[1]
    return (max(low, least), min(high, most))


def _reach(flow: Flow, node: Node, a: Any, bounds: Interval, inside: bool) -> Reach | None:
    """A bounded result is finite where the argument is not NaN."""
    if node not in flow.backward or not inside or not is_finite(bounds):
        return None
    notnan = flow.notnan(a)
    return Reach(magnitude(bounds), notnan) if notnan is not None else None
