"""For which sizes of its inputs a traced program holds: the constants and guards that tracing put on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gradprune.joint import JointGraph
from gradprune.size_expressions import evaluate_text, symbols_in

Shapes = Mapping[str, Sequence[int]]
Unbounded = int | None


@dataclass(frozen=True)
class SizeRules:
    """What one path of a program takes for granted of sizes; plain data, expressions as text.

    sizes: (input, dimension, expression). limits: symbol -> least and largest size. guards: what must hold.
    """

    sizes: tuple[tuple[str, int, str], ...]
    limits: Mapping[str, tuple[Unbounded, Unbounded]]
    guards: tuple[str, ...]

    @classmethod
    def of(cls, joint: JointGraph) -> SizeRules:
        values = [(item.name, item.node.meta["val"]) for item in joint.inputs if item.role != "tangent"]
        sizes = tuple(
            (name, dim, str(size.node.expr) if isinstance(size, torch.SymInt) else str(int(size)))
            for name, value in values
            if isinstance(value, torch.Tensor)
            for dim, size in enumerate(value.shape)
        )
        env = joint.shape_env
        limits = {str(symbol): (_whole(limit.lower), _whole(limit.upper)) for symbol, limit in env.var_to_range.items()}
        guards = [str(guard.expr) for guard in env.guards if not free_unbacked_symbols(guard.expr)]
        return cls(sizes, limits, tuple(dict.fromkeys(guards)))

    def hold(self, shapes: Shapes) -> bool:
        values: dict[str, int] = {}
        for name, dim, expression in self.sizes:
            if name in shapes and not (dim < len(shapes[name]) and self._take(expression, shapes[name][dim], values)):
                return False
        # Guards on what is not known here are on strides, which do not change what a program computes.
        return all(evaluate_text(guard, values) for guard in self.guards if symbols_in(guard) <= values.keys())

    def _take(self, expression: str, size: int, values: dict[str, int]) -> bool:
        if expression.isdecimal():
            return int(expression) == size
        if not expression.isidentifier():
            return True  # follows from the other sizes; tracing has put a guard where it does not
        least, largest = self.limits.get(expression, (None, None))
        within = (least is None or size >= least) and (largest is None or size <= largest)
        return within and values.setdefault(expression, size) == size


def _whole(limit: Any) -> Unbounded:
    return int(limit) if isinstance(limit, sympy.Integer) else None


class Admission:
    """The sizes for which a proof speaks, one set of rules a path. Answers are remembered per set of shapes."""

    def __init__(self, rules: Sequence[SizeRules]) -> None:
        self.rules = tuple(rules)
        self._known: dict[Any, bool] = {}

    @classmethod
    def of(cls, joints: Sequence[JointGraph]) -> Admission:
        return cls([SizeRules.of(joint) for joint in joints])

    def admits(self, shapes: Shapes) -> bool:
        """Whether the proof holds for inputs of these shapes, by name. Inputs that it does not read are ignored."""
        key = tuple((name, tuple(shape)) for name, shape in shapes.items())
        answer = self._known.get(key)
        if answer is None:
            answer = self._known[key] = all(rules.hold(shapes) for rules in self.rules)
        return answer
