"""Sizes as symbols, and the decisions of a program on data, enumerated instead of guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_symbols,
    free_unbacked_symbols,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.symbol import SymT, symbol_is_type

from gradprune.calls import current_line
from gradprune.errors import TraceError
from gradprune.facts import SourceLine
from gradprune.joint import Layout
from gradprune.trace.unknown import prefer_symbolic_extremum, refuse_number


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
        self.decisions: list[Decision] = []
        self.unbacked: list[str] = []
        self._definitions: dict[sympy.Symbol, sympy.Basic] = {}
        self._learning = False
        self._script = tuple(script)
        self._answers: dict[sympy.Basic, bool] = {}

    def evaluate_expr(
        self,
        orig_expr: Any,
        hint: Any = None,
        fx_node: Any = None,
        size_oblivious: bool = False,
        fallback_value: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        known = self._answers.get(orig_expr)
        if known is not None:
            return sympy.sympify(known)
        for size, other in self._factors_to_equate(orig_expr):
            super().evaluate_expr(sympy.Eq(size, other))
        try:
            if not _asks_about_floats(orig_expr):
                return super().evaluate_expr(orig_expr, hint, fx_node, **kwargs)
        except GuardOnDataDependentSymNode:
            pass
        # Torch goes on as if it did not know, and defers a check where that is not always right: see `facts`.
        if fallback_value is not None:
            return sympy.sympify(fallback_value)
        if isinstance(orig_expr, (Relational, BooleanFunction)):
            return sympy.sympify(self._decide(orig_expr))
        return self._refuse(orig_expr)

    def _factors_to_equate(self, question: Any) -> list[tuple[sympy.Symbol, sympy.Symbol]]:
        """Where flattened tensors must have one size, the sizes of their dimensions that are equal in the example.

        A guard on them narrows the sizes that the proof is for; without it, no position in one is known in the other.
        """
        if not isinstance(question, sympy.Eq) or not all(isinstance(side, sympy.Mul) for side in question.args):
            return []
        order = list(self.backed_var_to_val)
        sides = [[self.replacements.get(factor, factor) for factor in side.args] for side in question.args]
        if not all(factor in self.backed_var_to_val for side in sides for factor in side):
            return []
        ordered = [sorted(side, key=lambda s: (self.backed_var_to_val[s], order.index(s))) for side in sides]
        values = [[self.backed_var_to_val[symbol] for symbol in side] for side in ordered]
        return list(zip(*ordered)) if values[0] == values[1] else []

    def _make_data_dependent_error(self, expr: Any, unhinted_expr: Any, **_: Any) -> GuardOnDataDependentSymNode:
        return GuardOnDataDependentSymNode(expr, str(unhinted_expr))  # the stacks that torch adds take long

    def _decide(self, question: sympy.Basic) -> bool:
        prefer_symbolic_extremum()
        index = len(self.decisions)
        answer = self._script[index] if index < len(self._script) else True
        self.decisions.append(Decision(question, answer, current_line()))
        self._answers[question] = answer
        self._learn(question, answer)
        return answer

    def _learn(self, question: sympy.Basic, answer: bool) -> None:
        """Takes a decision into account for later questions. Facts about floats are not used: with NaN, not a < b
        does not mean a >= b."""
        if isinstance(question, (sympy.And if answer else sympy.Or)):
            for part in question.args:
                self._learn(part, answer)
        elif isinstance(question, sympy.Not):
            self._learn(question.args[0], not answer)
        elif isinstance(question, Relational) and all(side.is_integer for side in question.args):
            self._learning = True
            self.guard_or_defer_runtime_assert(question if answer else sympy.Not(question), "decision of this path")
            self._learning = False

    def _maybe_guard_rel(self, expr: Any) -> None:  # type: ignore[override]
        """Torch takes a size of data that meets another one for equal to it, though it may be 1 and be broadcast: such
        sizes keep their own names, so that no position in one is taken for a position in the other."""
        if self._learning or not (isinstance(expr, sympy.Eq) and free_unbacked_symbols(expr)):
            super()._maybe_guard_rel(expr)

    def _refuse(self, expr: sympy.Basic) -> None:
        message = f"the program needs the value of {expr}, which only data can tell, as a Python number"
        refuse_number(TraceError(message, current_line()))

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
        return self._created(super().create_unbacked_symint(*args, **kwargs))

    def create_unbacked_symfloat(self) -> Any:
        return self._created(super().create_unbacked_symfloat())

    def create_unbacked_symbool(self) -> Any:
        return self._created(super().create_unbacked_symbool())

    def _created(self, number: Any) -> Any:
        self.unbacked += [str(symbol) for symbol in number.node.expr.free_symbols]
        return number

    def define(self, number: Any, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Notes that the new `number` is ``function(*args)``, for `spelled_out`."""
        (symbol,) = number.node.expr.free_symbols
        operands = [self.spelled_out(arg.node.expr) if hasattr(arg, "node") else sympy.sympify(arg) for arg in args]
        self._definitions[symbol] = sympy.Function(f"python_{function.__name__}")(*operands)

    def spelled_out(self, expression: Any) -> Any:
        """An expression in terms of sizes and of values read."""
        return expression.xreplace(self._definitions) if isinstance(expression, sympy.Basic) else expression

    def assumptions(self) -> list[sympy.Basic]:
        """What torch took for granted about sizes that only data determines, such as that two of them are equal."""
        return [check.expr for checks in self.deferred_runtime_asserts.values() for check in checks]

    def guarded(self) -> frozenset[sympy.Symbol]:
        """Sizes on which the program decided something that does not follow from sizes being equal."""
        left = [sympy.sympify(guard.expr).xreplace(self.replacements) for guard in self.guards]
        return frozenset().union(*(expression.free_symbols for expression in left))

    def facts(self) -> tuple[tuple[sympy.Basic, bool], ...]:
        """Questions and their answers on this path: guards on sizes, decisions on data, and what torch assumed."""
        found = [(guard.expr, True) for guard in self.guards]
        found += [(assumption, True) for assumption in self.assumptions()]
        found += [(self.spelled_out(decision.question), decision.answer) for decision in self.decisions]
        found += [(symbol >= 2, True) for symbol in self.backed_var_to_val]  # torch takes 0 and 1 for constants
        return tuple(dict.fromkeys(found))


def _asks_about_floats(question: Any) -> bool:
    """Whether floats of data decide: torch takes them for real numbers, of which x <= x is always true."""
    return any(symbol_is_type(symbol, SymT.UNBACKED_FLOAT) for symbol in getattr(question, "free_symbols", ()))


class Sizes:
    """Makes the fake tensors of a trace, each size of two or more a symbol of its own where `symbolic`.

    device: where a tensor on the meta device is taken to be.
    """

    def __init__(
        self, mode: FakeTensorMode, shape_env: BranchingShapeEnv, device: torch.device, *, symbolic: bool
    ) -> None:
        self._mode, self._shape_env, self._device, self._symbolic = mode, shape_env, device, symbolic

    def fake(self, tensor: torch.Tensor, name: str, *, static: bool = False) -> torch.Tensor:
        """A fake tensor of the same dtype, device and layout, no data and no history."""
        sizes, strides = list(tensor.shape), list(tensor.stride())
        with _disable_current_modes():
            if self._symbolic and not static:
                symbols = [self._symbol(size, f"{name}.size({dim})") for dim, size in enumerate(sizes)]
                strides = self._strides(sizes, strides, symbols, name)
                sizes = symbols
            device = self._device if tensor.device.type == "meta" else tensor.device
            with self._mode:
                return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=device)

    def made(self, tensor: FunctionalTensor) -> bool:
        """Whether a tensor is of this trace, not of one before."""
        return torch._from_functional_tensor(tensor.elem).fake_mode is self._mode  # type: ignore[attr-defined]

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


def layout_of(name: str, tensor: torch.Tensor, *, requires_grad: bool) -> Layout:
    """What a trace takes for granted of a fake tensor."""
    sizes, strides = (tuple(map(_expression, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return Layout(name, tensor.dtype, tensor.device.type, sizes, strides, requires_grad)


def data_sizes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The sizes of a tensor where only data determines them, else ()."""
    return tuple(map(_expression, tensor.shape)) if any(map(free_unbacked_symbols, tensor.shape)) else ()


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def symbolic_dims(name: str, tensor: torch.Tensor, guarded: frozenset[sympy.Symbol]) -> tuple[str, ...]:
    """The dims of a traced leaf whose size may be any, as ``"logp[0]"``: symbolic, and none of the `guarded` ones."""
    found = [(dim, free_symbols(size)) for dim, size in enumerate(tensor.shape)]
    return tuple(f"{name}[{dim}]" for dim, symbols in found if symbols and not symbols & guarded)
