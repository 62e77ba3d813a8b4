"""One run of a program on fake tensors, written down as a joint forward-and-backward graph."""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.fx
from torch._decomp import core_aten_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef

from gradprune.calls import READS, CallRecorder, current_line, function_name, is_computation, tensors_in
from gradprune.errors import TraceError
from gradprune.facts import SourceLine
from gradprune.joint import Call, CallStream, Layout, TracedInput
from gradprune.trace.shapes import BranchingShapeEnv, Sizes, data_sizes, layout_of
from gradprune.trace.standins import SYMBOLIC
from gradprune.trace.unknown import Stopped, Unknown, first_unknown

# Which operators reach the analysis: with these, the fewest do.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())

Role = Literal["wrt", "input", "state", "tangent"]

_TEXT = frozenset(("__repr__", "__format__", "__str__"))
_LEAVES_TORCH = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr"))
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


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


@contextlib.contextmanager
def capturing(tracer: LineTracer, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Everything dispatched inside is functionalised, decomposed and written to the tracer's graph."""
    with (
        torch.autograd.set_multithreading_enabled(False),
        fake_mode,
        enable_python_dispatcher(),
        disable_autocast_cache(),
        ProxyTorchDispatchMode(tracer, "symbolic", decomposition_table=DECOMPOSITIONS),
        FunctionalTensorMode(_allow_token_discovery=True),
    ):
        yield


class TraceMode(CallRecorder):
    """Runs a program on fake tensors and records its calls; real tensors are replaced where a torch call meets them.

    A real tensor that was `adopt`-ed is replaced by its fake; any other is lifted to an input of role ``state`` whose
    value is unknown.
    """

    def __init__(self, tracer: LineTracer, sizes: Sizes, shape_env: BranchingShapeEnv) -> None:
        super().__init__({}, lines=True)
        self.inputs: list[TracedInput] = []
        self.backward = False
        self.matchable = True
        self._tracer, self._sizes, self._shape_env = tracer, sizes, shape_env
        self._swaps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._lifted: list[tuple[torch.Tensor, str, SourceLine | None]] = []
        self._layouts: dict[str, Layout] = {}
        self._others: dict[int, Layout] = {}
        self._reads: dict[str, tuple[int, int]] = {}
        self._outside: set[Any] = set()
        self._mutates = False
        self._starts: list[int] = []
        self._started: list[int] = []
        self._caught: list[tuple[Exception, SourceLine | None]] = []

    def leaf(self, tensor: torch.Tensor, name: str, role: Role, *, static: bool = False) -> torch.Tensor:
        """A new input of the graph like `tensor`; one of role ``wrt`` requires grad."""
        fake = self._sizes.fake(tensor, name, static=static)
        self.inputs.append(TracedInput(name, role, self._tracer.placeholder(fake, name)))
        self._layouts[name] = layout_of(name, fake, requires_grad=role == "wrt")
        functional = FunctionalTensor.to_functional(fake).requires_grad_(role == "wrt")
        self._outside.add(_storage(functional))
        return functional

    def adopt(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """From now on the program meets `fake` where it holds `tensor`."""
        self._swaps[id(tensor)] = (tensor, fake)

    def name_outside(self, tensor: torch.Tensor, name: str) -> None:
        """The name for `tensor`, should the program use it."""
        self._names[id(tensor)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        where = current_line()
        unknown = first_unknown((args, kwargs))
        if unknown is not None:
            return self._unknown_call(func, name, args, kwargs, unknown)
        if name in _TEXT:
            return f"<a tensor of {args[0].dtype}>"
        if name in _LEAVES_TORCH:
            self.matchable = False
            return Unknown(f"the data of a tensor, as {name} gives it,", where)
        args, kwargs = self._swap(args, where), self._swap(kwargs, where)
        if self.backward:
            return func(*args, **kwargs)
        if name == "register_hook":
            hook = args[1]
            args = (args[0], lambda grad: self.in_backward(hook, (grad,)))
        return self._call(func, name, args, kwargs, where)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, where: SourceLine | None) -> Any:
        operands = self.operands(args, kwargs)
        symbols = len(self._shape_env.unbacked)
        with self._attributed(where):
            try:
                result = self._constant(_stand_in(func, name)(*args, **kwargs))
            except _NEEDS_DATA as error:
                return self._needs_data(func, name, args, kwargs, where, error)
            except Exception as error:
                self._caught.append((error, where))
                raise
        if func in READS:
            number = self.numbers.of(args[0])[0]
            self._reads |= {symbol: (number, i) for i, symbol in enumerate(self._shape_env.unbacked[symbols:])}
        if mutates(name, kwargs):
            self._mutates |= any(_storage(tensor) in self._outside for tensor in tensors_in((args[:1], kwargs)))
        self.record(func, operands, where, result)
        return result

    def record(self, func: Any, operands: tuple[tuple[Any, ...], ...], where: Any, result: Any) -> None:
        if is_computation(func, result):
            made = list(tensors_in(result))
            sizes = tuple(map(data_sizes, made))
            self.calls.append(Call(function_name(func), operands, where, sizes if any(sizes) else ()))
            self.numbers.number_results(made)

    def enter_function(self, cls: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Records that an ``autograd.Function`` is applied, and replaces real tensors among its arguments."""
        where = current_line()
        args = self._swap(args, where)
        if not self.backward and not self._pauses:
            name = f"{cls.__module__}.{cls.__qualname__}.apply"
            self.calls.append(Call(name, self.operands(args, {}), where))
        return args

    def in_backward(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a piece of the backward that is Python code of the user."""
        with self:
            return function(*args)

    def operand(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, torch.Tensor):
            number = self.numbers.of(value)[0]
            if number not in self._others and id(value) in self._layouts_of_lifted:
                self._others[number] = self._layouts_of_lifted[id(value)]
            return ("tensor", number)
        if isinstance(value, SYMBOLIC):
            return ("data" if free_unbacked_symbols(value) else "size", value.node.expr)
        return ("value", value)

    @property
    def _layouts_of_lifted(self) -> dict[int, Layout]:
        return {id(fake): self._layouts[name] for fake, name, _ in self._lifted}

    @contextlib.contextmanager
    def _attributed(self, where: SourceLine | None) -> Iterator[None]:
        """Nodes made inside, and their backward, belong to the next call, made at `where`."""
        tracer = self._tracer
        before = tracer.call, tracer.where
        tracer.call, tracer.where = len(self.calls), where
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._started.append(len(self.calls))
        try:
            yield
        finally:
            tracer.call, tracer.where = before

    def _swap(self, value: Any, where: SourceLine | None) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FunctionalTensor) else self._swap_tensor(value, where)
        if type(value) in (list, tuple) and value:
            return type(value)(self._swap(item, where) for item in value)
        if type(value) is dict and value:
            return {key: self._swap(item, where) for key, item in value.items()}
        return value

    def _swap_tensor(self, tensor: torch.Tensor, where: SourceLine | None) -> torch.Tensor:
        known = self._swaps.get(id(tensor))
        if known is not None:
            return known[1]
        name = self._names.get(id(tensor), f"state{len(self._lifted)}")
        fake = self.leaf(tensor, name, "state", static=True)
        if tensor.requires_grad:
            fake.requires_grad_()
        self._lifted.append((fake, name, where))
        self.adopt(tensor, fake)
        return fake

    def _constant(self, result: Any) -> Any:
        """A tensor made from Python data by a function that the fake mode does not see becomes a constant."""
        if isinstance(result, torch.Tensor) and not isinstance(result, FunctionalTensor):
            return torch.ops.aten.lift_fresh.default(result)
        return result

    def _unknown_call(self, func: Any, name: str, args: Any, kwargs: Any, unknown: Unknown) -> Unknown:
        if mutates(name, kwargs) and not isinstance(args[0], Unknown):
            unknown.refuse()
        self.matchable = False
        return unknown

    def _needs_data(
        self, func: Any, name: str, args: Any, kwargs: Any, where: SourceLine | None, error: Exception
    ) -> Unknown:
        """What torch cannot compute without data is unknown, if no gradient passes through it."""
        operands = list(tensors_in((args, kwargs)))
        if mutates(name, kwargs) or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)):
            raise Stopped(TraceError(f"{function_name(func)} cannot be traced: {error}", where)) from error
        self.matchable = False
        return Unknown(f"the result of {function_name(func)}", where)

    def finish_forward(self) -> None:
        """Raises TraceError if the program caught an error that it may not meet on real tensors."""
        if self._caught:
            error, where = self._caught[0]
            raise TraceError(f"the program catches an error of a torch call: {type(error).__name__}: {error}", where)

    def stream(self, leaves: Sequence[str]) -> CallStream:
        """The recorded calls, and what a run must be like to be compared with them."""
        facts = self._shape_env.facts() if self.matchable else (False,)
        layouts = tuple(self._layouts[name] for name in leaves)
        return CallStream(tuple(self.calls), layouts, self._others, facts, self._reads, self._mutates)

    def gradients(
        self, loss: torch.Tensor, wrt: Sequence[torch.Tensor], tangent: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """The gradients of `loss`; each backward node gets the line of the call that it belongs to."""
        self.backward = True
        handles = [node.register_prehook(self._marker(node)) for node in _autograd_nodes(loss)]
        lifted = [item for item in self._lifted if item[0].requires_grad]
        self._tracer.call = None
        try:
            grads = torch.autograd.graph._engine_run_backward(
                (loss,), (tangent,), False, False, (*wrt, *(item[0] for item in lifted)), allow_unreachable=True
            )
        finally:
            for handle in handles:
                handle.remove()
        for grad, (_, name, where) in zip(grads[len(wrt) :], lifted):
            if grad is not None:
                message = f"{name}, a tensor that requires grad, enters from outside: name it in wrt, or detach it"
                raise TraceError(message, where)
        return list(grads[: len(wrt)])

    def _marker(self, node: Any) -> Callable[..., None]:
        index = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        call = self._started[index] if 0 <= index < len(self._started) else len(self.calls)
        where = self.calls[call].where if call < len(self.calls) else None

        def mark(*_: Any) -> None:
            self._tracer.where = where

        return mark


def _autograd_nodes(loss: torch.Tensor) -> list[Any]:
    seen: dict[Any, None] = {}
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            stack.extend(following for following, _ in node.next_functions)
    return list(seen)


def _storage(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


def mutates(name: str, kwargs: Any) -> bool:
    """Whether a torch function of this name writes to what it is given."""
    if "out" in kwargs or name in ("__setitem__", "__set__") or re.fullmatch(r"__i[a-z]+__", name):
        return name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") and not name.endswith("__")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _stand_in(func: Any, name: str) -> Any:
    return _equal if name == "equal" else func
