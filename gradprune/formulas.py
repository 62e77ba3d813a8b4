"""Values of symbolic expressions over sizes and data, in Python numbers.

Expressions are sympy's with torch's functions on them (floor division, truncation), and Python's own on floats of data;
they are compiled once each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import sympy


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


_ARITHMETIC = "add sub mul truediv floordiv mod pow neg abs eq ne lt le gt ge".split()

# The functions that torch puts into expressions over sizes, by their class names.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "PowByNatural": lambda a, b: a**b,
    "FloatPow": lambda a, b: a**b,
    "LShift": lambda a, b: a << b,
    "RShift": lambda a, b: a >> b,
    "ToFloat": float,
    "TruncToInt": math.trunc,
    "TruncToFloat": lambda a: float(math.trunc(a)),
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "RoundToInt": round,
    "RoundDecimal": round,
    "Identity": lambda a: a,
    "Where": _select,
    "Max": max,
    "Min": min,
    **{f"python_{name}": getattr(operator, name) for name in _ARITHMETIC},
    **{f"python_{name}": function for name, function in vars(math).items() if callable(function)},
    **{f"python_sym_{name}": function for name, function in (("max", max), ("min", min), ("float", float))},
}


@cache
def _compiled(expression: sympy.Basic) -> tuple[tuple[str, ...], Callable[..., Any]]:
    symbols = sorted(expression.free_symbols, key=str)
    return tuple(map(str, symbols)), sympy.lambdify(symbols, expression, modules=[FUNCTIONS, "math"])


def evaluate(expression: Any, values: Mapping[str, Any]) -> Any:
    """The value of `expression` under ``{symbol name: number}``; None where a symbol has no value.

    Raises what Python arithmetic raises: ZeroDivisionError, OverflowError, ValueError.
    """
    if not isinstance(expression, sympy.Basic):
        return expression
    names, function = _compiled(expression)
    try:
        return function(*[values[name] for name in names])
    except KeyError:
        return None


@cache
def symbol_name(expression: Any) -> str | None:
    """The name of an expression that is a symbol by itself; None for every other."""
    return str(expression) if isinstance(expression, sympy.Symbol) else None
