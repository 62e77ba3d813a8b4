"""One run of a program on fake tensors, written down as a joint forward-and-backward graph."""

from __future__ import annotations

import bisect
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    get_proxy_slot,
    track_tensor_tree,
)

from gradprune.calls import CallRecorder, function_name, is_computation, user_line
from gradprune.errors import TraceError
from gradprune.facts import SourceLine
from gradprune.joint import Call, TracedInput
from gradprune.trace.shapes import Sizes

# Which operators reach the analysis: with these, the fewest do.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())


class LineTracer(PythonKeyTracer):
    """An fx tracer that puts the current call and its line on each node it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = torch.nn.Module()
        self.graph = torch.fx.Graph(tracer_cls=type(self))
        self.tensor_attrs: dict[Any, str] = {}
        self.call: int | None = None
        self.where: SourceLine | None = None
        self._last_placeholder: torch.fx.Node | None = None

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["where"] = self.where
        if self.call is not None:
            node.meta["call"] = self.call
        if node.op == "get_attr":
            node.meta["constant"] = True
        return node

    def placeholder(self, fake: torch.Tensor, name: str) -> torch.fx.Node:
        """A new input of the graph, before every operator, for `fake`."""
        first = next(iter(self.graph.nodes), None)
        anchor = self._last_placeholder
        with self.graph.inserting_after(anchor) if anchor else _before(self.graph, first):
            proxy = self.create_proxy("placeholder", _identifier(name), (), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=self)
        self._last_placeholder = proxy.node
        return proxy.node


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "value"


def _before(graph: torch.fx.Graph, node: torch.fx.Node | None) -> contextlib.AbstractContextManager[Any]:
    return graph.inserting_before(node) if node is not None else contextlib.nullcontext()


class TraceMode(CallRecorder):
    """Runs a program on fake tensors: real ones are replaced where a torch call meets them.

    A real tensor of the `swaps` is replaced by its fake; any other is lifted to an input of role ``state`` whose value
    is unknown.
    """

    def __init__(self, tracer: LineTracer, sizes: Sizes) -> None:
        super().__init__({})
        self.tracer = tracer
        self.inputs: list[TracedInput] = []
        self.swaps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.lifted: list[tuple[torch.Tensor, SourceLine | None]] = []
        self._sizes = sizes
        self._starts: list[int] = []
        self._started: list[int] = []

    def leaf(self, tensor: torch.Tensor, name: str, role: str, *, static: bool = False) -> torch.Tensor:
        """A new input of the graph like `tensor`; one of role ``wrt`` requires grad."""
        fake = self._sizes.fake(tensor, name, static=static)
        node = self.tracer.placeholder(fake, name)
        self.inputs.append(TracedInput(name, role, node))  # type: ignore[arg-type]
        functional = FunctionalTensor.to_functional(fake)
        return functional.requires_grad_(role == "wrt")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = user_line(sys._getframe(1))
        args = self.swap(args, where)
        kwargs = self.swap(kwargs or {}, where)
        operands = self.operands(args, kwargs)
        with self.attributed(where):
            result = self.constant(func(*args, **kwargs))
        if is_computation(func, result):
            self.calls.append(Call(function_name(func), operands, where))
            self.number_results(result)
        return result

    @contextlib.contextmanager
    def attributed(self, where: SourceLine | None) -> Iterator[None]:
        """Nodes made inside, and their backward, belong to the next call, made at `where`."""
        before = self.tracer.call, self.tracer.where
        self.tracer.call, self.tracer.where = len(self.calls), where
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._started.append(len(self.calls))
        try:
            yield
        finally:
            self.tracer.call, self.tracer.where = before

    def operand(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ("size", value.node.expr)
        return ("value", value)

    def swap(self, value: Any, where: SourceLine | None) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FunctionalTensor) else self._swap_tensor(value, where)
        if type(value) in (list, tuple) and value:
            return type(value)(self.swap(item, where) for item in value)
        if type(value) is dict and value:
            return {key: self.swap(item, where) for key, item in value.items()}
        return value

    def _swap_tensor(self, tensor: torch.Tensor, where: SourceLine | None) -> torch.Tensor:
        known = self.swaps.get(id(tensor))
        if known is not None:
            return known[1]
        fake = self.leaf(tensor, f"state{len(self.lifted)}", "state", static=True)
        if tensor.requires_grad:
            fake.requires_grad_()
        self.lifted.append((fake, where))
        self.swaps[id(tensor)] = (tensor, fake)
        return fake

    def constant(self, result: Any) -> Any:
        """A tensor made from Python data by a function that the fake mode does not see becomes a constant."""
        if isinstance(result, torch.Tensor) and not isinstance(result, FunctionalTensor):
            return torch.ops.aten.lift_fresh_copy.default(result)
        return result

    def call_at(self, sequence: int) -> int | None:
        """The call during which the autograd node with this sequence number was made."""
        index = bisect.bisect_right(self._starts, sequence) - 1
        return self._started[index] if index >= 0 else None


def gradients(
    mode: TraceMode, loss: torch.Tensor, wrt: list[torch.Tensor], tangent: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of `loss`, each backward node marked with the line of the call that it belongs to."""
    tracer = mode.tracer
    handles = []

    def mark(index: int | None) -> Callable[..., None]:
        where = mode.calls[index].where if index is not None and index < len(mode.calls) else None

        def hook(*_: Any) -> None:
            tracer.where = where

        return hook

    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        handles.append(node.register_prehook(mark(mode.call_at(node._sequence_nr()))))
        stack.extend(next_node for next_node, _ in node.next_functions)
    tracer.call = None
    found = [tensor for tensor, _ in mode.lifted if tensor.requires_grad]
    try:
        grads = torch.autograd.grad(loss, [*wrt, *found], tangent, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for grad, (_, where) in zip(grads[len(wrt) :], [item for item in mode.lifted if item[0].requires_grad]):
        if grad is not None:
            raise TraceError("a tensor that requires grad enters from outside: name it in wrt, or detach it", where)
    return list(grads[: len(wrt)])


@contextlib.contextmanager
def capturing(tracer: LineTracer, fake_mode: Any) -> Iterator[None]:
    """Everything dispatched inside is functionalised, decomposed and written to the tracer's graph."""
    proxy_mode = ProxyTorchDispatchMode(tracer, "symbolic", decomposition_table=DECOMPOSITIONS)
    with (
        torch.autograd.set_multithreading_enabled(False),
        fake_mode,
        enable_python_dispatcher(),
        disable_autocast_cache(),
        proxy_mode,
        FunctionalTensorMode(_allow_token_discovery=True),
    ):
        yield


def node_of(tracer: LineTracer, tensor: torch.Tensor) -> Any:
    """The graph node that computed `tensor`; a constant is put into the graph."""
    torch._sync(tensor)
    inner = torch._from_functional_tensor(tensor.elem)  # type: ignore[attr-defined]
    slot = get_proxy_slot(inner, tracer, None)
    return slot.proxy.node if slot is not None else tracer.create_arg(inner)
