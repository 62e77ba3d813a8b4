"""Sizes as symbols, and the decisions of a program on data, enumerated instead of guessed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv, free_symbols
from torch.utils._python_dispatch import _disable_current_modes

from gradprune.calls import user_line
from gradprune.errors import TraceError
from gradprune.facts import SourceLine


@dataclass(frozen=True)
class Decision:
    """A question about data that the program asked, and the answer of this path."""

    question: sympy.Basic
    answer: bool
    where: SourceLine | None

    def __str__(self) -> str:
        text = (
            self.where.text if self.where and self.where.text.startswith(("if ", "elif ", "while ", "assert ")) else ""
        )
        return f"{text or self.question} -> {self.answer}"


class BranchingShapeEnv(ShapeEnv):
    """A ShapeEnv that answers what only data can answer from a script, and notes the decisions taken.

    script: the answers of this path, in the order of the questions; every further question is answered True.
    """

    def __init__(self, script: Sequence[bool]) -> None:
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True, duck_shape=False)
        self._script = tuple(script)
        self._answers: dict[sympy.Basic, bool] = {}
        self.decisions: list[Decision] = []

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        known = self._answers.get(orig_expr)
        if known is not None:
            return sympy.sympify(known)
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            if not orig_expr.is_Boolean and not isinstance(orig_expr, sympy.logic.boolalg.Boolean):
                where = user_line(sys._getframe(1))
                raise TraceError(
                    f"the program turns a value read from a tensor into a Python number: {orig_expr}", where
                ) from error
            return sympy.sympify(self._decide(orig_expr))

    def _decide(self, question: sympy.Basic) -> bool:
        index = len(self.decisions)
        answer = self._script[index] if index < len(self._script) else True
        self.decisions.append(Decision(question, answer, user_line(sys._getframe(1))))
        self._answers[question] = answer
        self._learn(question if answer else sympy.Not(question))
        return answer

    def _learn(self, fact: sympy.Basic) -> None:
        """Takes a decision into account for later questions. Facts about floats are not used: with NaN, not a < b
        does not mean a >= b."""
        if all(symbol.is_integer for symbol in fact.free_symbols):
            self.guard_or_defer_runtime_assert(fact, "decision of this path")


class Sizes:
    """Makes the fake tensors of a trace, each size of two or more a symbol of its own where `symbolic`."""

    def __init__(self, mode: FakeTensorMode, shape_env: BranchingShapeEnv, *, symbolic: bool) -> None:
        self._mode, self._shape_env, self._symbolic = mode, shape_env, symbolic

    def fake(self, tensor: torch.Tensor, name: str, *, static: bool = False) -> torch.Tensor:
        """A fake tensor of the same dtype, device and layout, no data and no history."""
        sizes, strides = list(tensor.shape), list(tensor.stride())
        with _disable_current_modes():
            if self._symbolic and not static:
                symbols = [self._symbol(size, f"{name}.size({dim})") for dim, size in enumerate(sizes)]
                strides = self._strides(sizes, strides, symbols, name)
                sizes = symbols
            with self._mode:
                return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)

    def _symbol(self, size: int, source: str) -> Any:
        if size < 2:
            return size
        expr = self._shape_env.create_symbol(size, ConstantSource(source), dynamic_dim=DimDynamic.DYNAMIC)
        return self._shape_env.create_symintnode(expr, hint=size, source=ConstantSource(source))

    def _strides(self, sizes: list[int], strides: list[int], symbols: list[Any], name: str) -> list[Any]:
        """Strides in terms of the size symbols where the layout is dense, else symbols of their own."""
        made: list[Any] = list(strides)
        expected: int = 1
        expected_symbol: Any = 1
        for dim in sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim] != 1, -dim)):
            if strides[dim] == expected:
                made[dim] = expected_symbol
            elif strides[dim] > 1:
                made[dim] = self._symbol(strides[dim], f"{name}.stride({dim})")
            expected, expected_symbol = strides[dim] * sizes[dim], made[dim] * symbols[dim]
        return made


def symbolic_dims(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
    """The dims of a traced leaf whose size stayed symbolic, as ``"logp[0]"``."""
    return tuple(f"{name}[{dim}]" for dim, size in enumerate(tensor.shape) if free_symbols(size))
