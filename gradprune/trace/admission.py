"""For which sizes of its inputs a traced program holds: the constants and guards that tracing put on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gradprune.joint import JointGraph

Shapes = Mapping[str, Sequence[int]]


class Admission:
    """The sizes for which a proof made of `joints` speaks. Answers are remembered per set of shapes."""

    def __init__(self, joints: Sequence[JointGraph]) -> None:
        self._rules = [_Rules(joint) for joint in joints]
        self._known: dict[Any, bool] = {}

    def admits(self, shapes: Shapes) -> bool:
        """Whether the proof holds for inputs of these shapes, by name. Inputs that it does not read are ignored."""
        key = tuple((name, tuple(shape)) for name, shape in shapes.items())
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = all(rules.hold(shapes) for rules in self._rules)
        return answer


class _Rules:
    def __init__(self, joint: JointGraph) -> None:
        values = [(item.name, item.node.meta["val"]) for item in joint.inputs if item.role != "tangent"]
        self._sizes = [
            (name, dim, _expression(size))
            for name, value in values
            if isinstance(value, torch.Tensor)
            for dim, size in enumerate(value.shape)
        ]
        env = joint.shape_env
        self._ranges = dict(env.var_to_range)
        self._guards = [guard.expr for guard in env.guards if not free_unbacked_symbols(guard.expr)]

    def hold(self, shapes: Shapes) -> bool:
        values: dict[sympy.Symbol, sympy.Integer] = {}
        for name, dim, expression in self._sizes:
            if name not in shapes:
                continue
            if len(shapes[name]) <= dim:
                return False
            if not self._take(expression, sympy.Integer(int(shapes[name][dim])), values):
                return False
        return all(guard.xreplace(values) in (True, sympy.true) for guard in self._guards if self._known(guard, values))

    def _take(self, size: sympy.Expr, value: sympy.Integer, values: dict[sympy.Symbol, sympy.Integer]) -> bool:
        if not isinstance(size, sympy.Symbol):
            return bool(size == value) if size.is_number else True
        limits = self._ranges.get(size)
        if limits is not None and not (limits.lower <= value <= limits.upper):
            return False
        return values.setdefault(size, value) == value

    @staticmethod
    def _known(guard: sympy.Basic, values: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
        """Whether a guard speaks of sizes only; those on strides do not change what a program computes."""
        return guard.free_symbols <= values.keys()


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
