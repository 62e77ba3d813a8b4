"""The graph of what a traced program dispatches: functional, decomposed, each node with the user's line."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    decompose,
    disable_autocast_cache,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.symbol import SymT, symbol_is_type

from gradprune.facts import SourceLine

# Which operators reach the analysis: with these, the fewest do. A backward kernel stays whole, because its
# decomposition can be finite where the kernel gives 0 * inf.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    operator: steps for operator, steps in core_aten_decompositions().items() if "_backward" not in str(operator)
}


class LineTracer(PythonKeyTracer):
    """An fx tracer that puts the current call and its line on each node it makes.

    is_python: whether the current call has only Python values to make a tensor from; not so an array, which is data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = torch.nn.Module()
        self.graph = torch.fx.Graph(tracer_cls=type(self))
        self.tensor_attrs: dict[Any, str] = {}
        self.call: int | None = None
        self.where: SourceLine | None = None
        self.is_python = False
        self._last_placeholder: torch.fx.Node | None = None

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["where"] = self.where
        if self.call is not None:
            node.meta["call"] = self.call
        if node.op == "get_attr":
            node.meta["constant"] = self.is_python
        return node

    def placeholder(self, fake: torch.Tensor, name: str) -> torch.fx.Node:
        """A new input of the graph, after the other inputs, before every operator, for `fake`."""
        anchor, first = self._last_placeholder, next(iter(self.graph.nodes), None)
        place: Any = contextlib.nullcontext()
        if anchor is not None:
            place = self.graph.inserting_after(anchor)
        elif first is not None:
            place = self.graph.inserting_before(first)
        with place:
            proxy = self.create_proxy("placeholder", re.sub(r"\W+", "_", name).strip("_"), (), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=self)
        self._last_placeholder = proxy.node
        return proxy.node

    def node_of(self, tensor: torch.Tensor) -> Any:
        """The node that computed `tensor`."""
        torch._sync(tensor)
        inner = torch._from_functional_tensor(tensor.elem)  # type: ignore[attr-defined]
        slot = get_proxy_slot(inner, self, None)
        return slot.proxy.node if slot is not None else self.create_arg(inner)


def number_of_data(function: Callable[..., Any], args: tuple[Any, ...], tracer: Any = None) -> Any:
    """``function(*args)`` of symbolic numbers as a number of which nothing is known, and a node of the graph for it."""
    tracer = tracer or get_proxy_mode().tracer  # type: ignore[union-attr]
    env = next(arg for arg in args if isinstance(arg, _SYMBOLIC)).node.shape_env
    with env.ignore_fresh_unbacked_symbols():
        result = env.create_unbacked_symbool() if function in _QUESTIONS else env.create_unbacked_symfloat()
    env.define(result, function, args)
    proxies = tuple(get_proxy_slot(arg, tracer).force() if isinstance(arg, _SYMBOLIC) else arg for arg in args)
    track_tensor_tree(result, tracer.create_proxy("call_function", function, proxies, {}), constant=None, tracer=tracer)
    return result


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_QUESTIONS = frozenset(
    (
        *(operator.and_, operator.or_, torch.sym_not),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(math.isnan, math.isinf, math.isfinite, math.isclose),
    )
)


class NumberMode(ProxyTorchDispatchMode):
    """Adds operators, and Python arithmetic on symbolic numbers, to the graph being traced.

    Symbols obey the algebra of real numbers. A float of data may be infinite or NaN: where algebra would make it
    vanish, as in ``x * 0`` or ``x - x``, and where a number is infinite or NaN, the result is a new symbol.
    """

    def __sym_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if any(isinstance(arg, float) and not math.isfinite(arg) for arg in args):
            return number_of_data(func, args, self.tracer)
        result = super().__sym_dispatch__(func, types, args, kwargs)
        data = frozenset[Any]().union(*map(_floats_of_data, args))
        vanished = data and not data <= free_unbacked_symbols(result)
        return number_of_data(func, args, self.tracer) if vanished else result


def _floats_of_data(value: Any) -> set[Any]:
    """The floats of data that a float or the answer to a question is made of; integers obey algebra."""
    if not isinstance(value, (torch.SymFloat, torch.SymBool)):
        return set()
    return {symbol for symbol in free_unbacked_symbols(value) if symbol_is_type(symbol, SymT.UNBACKED_FLOAT)}


def floor_division(original: Callable[[Any, Any], Any], *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    """``//`` of symbolic numbers, which torch takes for the floor of a quotient: with floats of data it is not that."""

    def divide(a: Any, b: Any) -> Any:
        floats = [number for number in (a, b) if isinstance(number, (float, torch.SymFloat))]
        known = [math.isfinite(n) if isinstance(n, float) else not free_unbacked_symbols(n) for n in floats]
        return original(a, b) if all(known) else number_of_data(operator.floordiv, (b, a) if swapped else (a, b))

    return divide


@contextlib.contextmanager
def capturing(tracer: LineTracer, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Everything dispatched inside is functionalised, decomposed and written to the tracer's graph."""
    with (
        torch.autograd.set_multithreading_enabled(False),
        fake_mode,
        enable_python_dispatcher(),
        disable_autocast_cache(),
        NumberMode(tracer, "symbolic"),
        decompose(DECOMPOSITIONS),
        FunctionalTensorMode(_allow_token_discovery=True),
    ):
        yield
