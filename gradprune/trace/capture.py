"""One run of a program on fake tensors: who its inputs are, what it calls, which line made which node."""

from __future__ import annotations

import bisect
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import FrameType
from typing import Any, Literal

import sympy
import torch
import torch.fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef

from gradprune.calls import (
    COMPARISONS,
    READS,
    CallRecorder,
    current_line,
    flatten,
    function_name,
    is_computation,
    mutates,
    read_key,
    tensors_in,
)
from gradprune.errors import TraceError
from gradprune.facts import SourceLine
from gradprune.joint import Call, CallStream, Layout, TracedInput
from gradprune.trace.graphs import Equality, autograd_nodes
from gradprune.trace.shapes import BranchingShapeEnv, Sizes, data_sizes, layout_of
from gradprune.trace.standins import SYMBOLIC, TORCH_FUNCTIONS, source_of
from gradprune.trace.tracer import LineTracer
from gradprune.trace.unknown import LazyList, Stopped, Unknown, filled, first_unknown

# Python code that runs below the torch function mode: what it calls is not a call of the program.
_DISPATCH = os.path.dirname(torch._subclasses.__file__) + os.sep

Role = Literal["wrt", "input", "state", "tangent"]

_TEXT = frozenset(("__repr__", "__format__", "__str__"))
_LEAVES_TORCH = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr"))
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


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
        self._lifted_layouts: dict[int, Layout] = {}
        self._others: dict[int, Layout] = {}
        self._reads: dict[str, tuple[tuple[Any, ...], int]] = {}
        self._outside: set[Any] = set()
        self._equality = Equality()
        self._values: dict[tuple[Any, ...], Any] = {}
        self._mutates = False
        self._inside_scripted = 0
        self._no_grad = False
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

    def align(self, shapes: Sequence[torch.Size]) -> None:
        """From now on these shapes are the same in each dimension that they share, but where a size is 1."""
        for sizes in zip_longest(*shapes, fillvalue=1):
            nodes: list[Any] = [getattr(size, "node") for size in sizes if isinstance(size, torch.SymInt)]  # noqa: B009
            for node in nodes[1:]:
                if node.hint == nodes[0].hint:
                    self._shape_env.evaluate_expr(sympy.Eq(nodes[0].expr, node.expr))

    def adopt(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """From now on the program meets `fake` where it holds `tensor`."""
        self._swaps[id(tensor)] = (tensor, fake)

    def name_outside(self, tensor: torch.Tensor, name: str) -> None:
        """The name for `tensor`, should the program use it."""
        self._names[id(tensor)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_dispatch(sys._getframe(1)) or any(map(_is_below, tensors_in((args, kwargs)))):
            return func(*args, **kwargs)  # a piece of torch at work, not a call of the program
        name = getattr(func, "__name__", "")
        where = current_line()
        args, kwargs = filled(args), filled(kwargs)
        unknown = first_unknown((args, kwargs))
        if unknown is not None:
            return self._unknown_call(func, name, args, kwargs, unknown)
        if name in _TEXT:
            return f"<a tensor of {args[0].dtype}>"
        if name in _LEAVES_TORCH:
            self.matchable = False
            return Unknown(f"the data of a tensor, as {name} gives it,", where)
        args, kwargs = self._swap(args, where), self._swap(kwargs, where)
        if self.backward or self._pauses:
            return func(*args, **kwargs)
        return self._call(func, name, args, kwargs, where)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, where: SourceLine | None) -> Any:
        if (func in READS or func in COMPARISONS) and isinstance(args[0], FunctionalTensor):
            return self._read(func, name, args, kwargs, where)
        operands = () if self._inside_scripted else self.operands(args, kwargs)
        with self._attributed(where, is_python=not any(map(_is_array, flatten(args, kwargs)))):
            try:
                result = TORCH_FUNCTIONS.get(name, func)(*self._hooked(name, args), **kwargs)
            except _NEEDS_DATA as error:
                return self._needs_data(func, name, args, kwargs, where, error)
            except Exception as error:
                self._caught.append((error, where))
                raise
        if mutates(name, kwargs):
            self._mutates |= any(_storage(tensor) in self._outside for tensor in tensors_in((args[:1], kwargs)))
        self.record(func, operands, where, result)
        return result

    def record(self, func: Any, operands: tuple[tuple[Any, ...], ...], where: Any, result: Any) -> None:
        if is_computation(func, result) and not self._inside_scripted:
            self._append(function_name(func), operands, where, result)

    def _append(self, name: str, operands: tuple[tuple[Any, ...], ...], where: Any, result: Any) -> None:
        made = list(tensors_in(result))
        sizes = tuple(map(data_sizes, made))
        self.calls.append(Call(name, operands, where, sizes if any(sizes) else ()))
        self.numbers.number_results(made)

    def enter_function(self, cls: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Records that an ``autograd.Function`` is applied, and replaces real tensors among its arguments."""
        where = current_line()
        args = self._swap(args, where)
        if not self.backward and not self._pauses:
            name = f"{cls.__module__}.{cls.__qualname__}.apply"
            self._starts.append(torch._C._autograd._get_sequence_nr())
            self._started.append(len(self.calls))
            self.calls.append(Call(name, self.operands(args, {}), where))
        return args

    def enter_scripted(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records one call for a scripted function and traces its source: a run shows no more of it."""
        where = current_line()
        args, kwargs = self._swap(args, where), self._swap(kwargs, where)
        operands = self.operands(args, kwargs)
        with self._attributed(where, is_python=False):
            self._inside_scripted += 1
            try:
                result = source_of(function)(*args, **kwargs)
            finally:
                self._inside_scripted -= 1
        if not self._inside_scripted:
            self._append(name, operands, where, result)
        return result

    def forget(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Makes the content of `tensors` unknown, as a collective does that exchanges them with other processes."""
        where = current_line()
        for tensor in tensors:
            if tensor.requires_grad:
                raise Stopped(TraceError(f"{what} between processes changes a tensor that requires grad", where))
            if isinstance(tensor, FunctionalTensor):
                name = f"{what}{sum(item.name.startswith(what) for item in self.inputs)}"
                with self.paused():
                    tensor.copy_(self.leaf(tensor, name, "state", static=True))

    @contextlib.contextmanager
    def recording_no_grad(self) -> Iterator[None]:
        """Calls made inside are recorded as made without gradient, as a reentrant checkpoint makes them."""
        before, self._no_grad = self._no_grad, True
        try:
            yield
        finally:
            self._no_grad = before

    def operands(self, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], ...]:
        operands = super().operands(args, kwargs)
        return (("value", False), *operands[1:]) if self._no_grad else operands

    def in_backward(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a piece of the backward that is Python code of the user."""
        with self:
            return function(*args)

    def operand(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, torch.Tensor):
            number = self.numbers.of(value)[0]
            layout = self._lifted_layouts.get(id(value))
            if layout is not None:
                self._others.setdefault(number, layout)
            return ("tensor", number)
        if isinstance(value, SYMBOLIC):
            kind = "data" if free_unbacked_symbols(value) else "size"
            return (kind, self._shape_env.spelled_out(value.node.expr))
        return ("value", value)

    @contextlib.contextmanager
    def _attributed(self, where: SourceLine | None, *, is_python: bool) -> Iterator[None]:
        """Nodes made inside, and their backward, belong to the next call, made at `where`."""
        tracer = self._tracer
        before = tracer.call, tracer.where, tracer.is_python
        tracer.call, tracer.where, tracer.is_python = len(self.calls), where, is_python
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._started.append(len(self.calls))
        try:
            yield
        finally:
            tracer.call, tracer.where, tracer.is_python = before

    def _swap(self, value: Any, where: SourceLine | None) -> Any:
        if isinstance(value, torch.Tensor):
            if not _is_ours(value):
                return self._swap_tensor(value, where)
            if isinstance(value, FunctionalTensor) and not self._sizes.made(value):
                raise Stopped(TraceError("the program keeps a tensor of a call before, out of reach of a trace", where))
            return value
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
        self._lifted_layouts[id(fake)] = replace(self._layouts[name], requires_grad=tensor.requires_grad)
        self.adopt(tensor, fake)
        return fake

    def _read(self, func: Any, name: str, args: Any, kwargs: Any, where: SourceLine | None) -> Any:
        """A value read from a tensor; reading an equal tensor again gives the same one."""
        equal = [self._equality.of(self._tracer.node_of(tensor)) for tensor in tensors_in(args)]
        key = (name, *equal, repr([arg for arg in args if not isinstance(arg, torch.Tensor)]), repr(kwargs))
        if key not in self._values:
            first = len(self._shape_env.unbacked)
            with self._attributed(where, is_python=False):
                read = self._list if name == "tolist" else TORCH_FUNCTIONS.get(name, func)
                self._values[key] = read(*args, **kwargs)
            self._note_reads(read_key(self.numbers, func, args), first)
        return self._values[key]

    def _hooked(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call, a hook among them made to run as user code in the backward."""
        if name != "register_hook":
            return args
        return (args[0], lambda grad: self.in_backward(args[1], (grad,)))

    def _list(self, tensor: torch.Tensor) -> Any:
        if not any(free_symbols(size) for size in tensor.shape):
            return _as_list(tensor)
        key = read_key(self.numbers, torch.Tensor.tolist, (tensor,))

        def fill() -> list[Any]:
            first = len(self._shape_env.unbacked)
            with self.paused():
                values = _as_list(tensor)
            self._note_reads(key, first)
            return values

        return LazyList(fill, self._tracer.where)

    def _note_reads(self, key: tuple[Any, ...], first: int) -> None:
        """Notes that the symbols made since there were `first` of them are the values that a read gave, in order."""
        self._reads |= {symbol: (key, i) for i, symbol in enumerate(self._shape_env.unbacked[first:])}

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

    def lift_arrays(self) -> None:
        """Makes inputs of the tensors that the program made from arrays: what an array holds is not its code."""
        for node in list(self._tracer.graph.nodes):
            if node.op == "get_attr" and not node.meta["constant"] and node.users:
                name = f"array{sum(item.name.startswith('array') for item in self.inputs)}"
                placeholder = self._tracer.placeholder(node.meta["val"], name)
                self.inputs.append(TracedInput(name, "state", placeholder))
                node.replace_all_uses_with(placeholder)

    def finish_forward(self) -> None:
        """Raises TraceError if the program caught an error that it may not meet on real tensors."""
        if self._caught:
            error, where = self._caught[0]
            raise TraceError(f"the program catches an error of a torch call: {type(error).__name__}: {error}", where)

    def stream(self, leaves: Sequence[str]) -> CallStream:
        """The recorded calls, and what a run must be like to be compared with them."""
        facts = self._shape_env.facts() if self.matchable else ((False, True),)
        layouts = tuple(self._layouts[name] for name in leaves)
        return CallStream(tuple(self.calls), layouts, self._others, facts, self._reads, self._mutates)

    def gradients(
        self, loss: torch.Tensor, wrt: Sequence[torch.Tensor], tangent: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """The gradients of `loss`; each backward node gets the line of the call that it belongs to."""
        self.backward = True
        handles = [node.register_prehook(self._marker(node)) for node in autograd_nodes(loss)]
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


def _storage(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


def _as_list(tensor: torch.Tensor) -> Any:
    return [_as_list(item) for item in tensor.unbind()] if tensor.dim() else tensor.item()


def _is_dispatch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_DISPATCH)


def _is_below(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that only torch's own code handles during a trace."""
    return isinstance(tensor, FakeTensor) or torch._is_functional_tensor(tensor)


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and not isinstance(value, torch.Tensor)


def _is_ours(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FunctionalTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
