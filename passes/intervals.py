"""Bounds of tensor elements as (low, high) pairs of Python floats, sound for every floating dtype's rounding.

A bound speaks of the elements that are not NaN. Results are rounded outward to eight significant bits, which every
floating dtype represents, so that a kernel's own monotone rounding cannot step over them.
"""

from __future__ import annotations

import math
from typing import Final

import torch

Interval = tuple[float, float]
ANY: Final[Interval] = (-math.inf, math.inf)
MANY: Final = 2.0**40
"""More elements than a tensor has."""

_LARGEST: Final = {
    torch.float16: 65504.0,
    torch.bfloat16: 3.38e38,
    torch.float32: 3.40e38,
    torch.float64: 1.79e308,
}
_SMALLEST: Final = {torch.float16: 2.0**-14}
_SMALLEST_OTHER: Final = 2.0**-126


def range_of(dtype: torch.dtype | None) -> Interval:
    """Every value that is not NaN and that this dtype can hold."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return ANY
    if dtype == torch.bool:
        return (0.0, 1.0)
    info = torch.iinfo(dtype)
    return (float(info.min), float(info.max))


def rounded(interval: Interval, dtype: torch.dtype | None) -> Interval:
    """The interval widened to what a result of this dtype can be: rounding, overflow to inf, wrap-around."""
    low, high = interval
    if math.isnan(low) or math.isnan(high) or dtype is None or dtype.is_complex:
        return range_of(dtype)
    if not dtype.is_floating_point:
        least, most = range_of(dtype)
        return (low, high) if least <= low and high <= most else (least, most)
    return (-_up(-low, dtype), _up(high, dtype))


def _up(value: float, dtype: torch.dtype) -> float:
    """`value` or a little more: representable in `dtype`, inf above its largest number, 0 for a tiny negative."""
    if math.isinf(value) or value == 0:
        return value
    if dtype not in _LARGEST:
        return math.inf
    smallest = _SMALLEST.get(dtype, _SMALLEST_OTHER)
    if abs(value) < smallest:
        return smallest if value > 0 else 0.0
    mantissa, exponent = math.frexp(value)
    value = math.ldexp(math.ceil(mantissa * 256) / 256, exponent)
    largest = _LARGEST[dtype]
    return math.inf if value > largest else max(value, -largest)


def added(a: Interval, b: Interval) -> Interval:
    return (a[0] + b[0], a[1] + b[1])


def negated(a: Interval) -> Interval:
    return (-a[1], -a[0])


def multiplied(a: Interval, b: Interval) -> Interval:
    corners = [_times(x, y) for x in a for y in b]
    return (min(corners), max(corners))


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def divided(a: Interval, b: Interval) -> Interval:
    """a / b. Unknown where b may be zero: even ``nonnegative / nonnegative`` is -inf at 1 / -0.0."""
    low, high = b
    if low <= 0 <= high:
        return ANY
    return multiplied(a, (1.0 / high, 1.0 / low))


def joined(a: Interval, b: Interval) -> Interval:
    return (min(a[0], b[0]), max(a[1], b[1]))


def magnitude(a: Interval) -> float:
    return max(abs(a[0]), abs(a[1]))


def is_finite(a: Interval) -> bool:
    return math.isfinite(a[0]) and math.isfinite(a[1])
