"""The comparison of a running program's torch calls with recorded ones: equal calls, equal operands, equal order."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gradprune.calls import (
    COMPARISONS,
    READS,
    Numbers,
    PausableMode,
    autocast_state,
    flatten,
    function_name,
    is_computation,
    read_key,
    tensors_in,
)
from gradprune.formulas import evaluate, symbol_name
from gradprune.joint import Call, CallStream, Layout
from gradprune.trace.standins import watching_compiled, watching_functions, watching_scripted, withdraw

Result = Callable[[torch.Tensor], None]


class CallWatch(PausableMode):
    """Compares the calls made while it is entered with recorded streams, one per path of the recorded program.

    leaves: the names of the streams' leaves, or the tensors by name; names alone are bound later, with `bind`, but
        before the program uses the tensor.
    on_result: by call index, what to do with the tensor that this call gave; one mapping for all streams, or one
        for each.

    After `finish`, ``matched`` is the index of the stream that the run equals, or None. ``difference`` says where it
    left the last stream that it had left.
    """

    def __init__(
        self,
        streams: Sequence[CallStream],
        leaves: Sequence[str] | Mapping[str, torch.Tensor] = (),
        on_result: Mapping[int, Result] | Sequence[Mapping[int, Result]] = (),
    ) -> None:
        super().__init__()
        self.matched: int | None = None
        self.difference = "" if streams else "nothing was recorded to compare with"
        self._streams = streams
        self._alive = list(range(len(streams)))
        actions = [on_result] * len(streams) if isinstance(on_result, Mapping) else list(on_result)
        self._on_result: list[Mapping[int, Result]] = actions or [{}] * len(streams)
        self._place = {layout.name: number for number, layout in enumerate(streams[0].leaves)} if streams else {}
        self.numbers = Numbers(len(self._place))
        self._values: list[dict[str, Any]] = [{} for _ in streams]
        self._symbols = [_inverse(stream.reads) for stream in streams]
        self._read: dict[tuple[Any, ...], int] = {}
        self._leaf_storages: dict[int, str] = {}
        self._position = 0
        if isinstance(leaves, Mapping):
            for name, tensor in leaves.items():
                self.bind(name, tensor)

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        """Says which tensor is the leaf `name`; a name that the streams do not have is ignored."""
        number = self._place.get(name)
        if number is None:
            return
        self.numbers.bind(tensor, number)
        self._keep(lambda stream, values: self._leaf_differs(stream, stream.leaves[number], tensor, values))

    def __enter__(self) -> CallWatch:
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(watching_functions(self._enter_function))
        self._hooks.enter_context(watching_scripted(self._enter_scripted))
        self._hooks.enter_context(watching_compiled(self._enter_compiled))
        self._entered = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        if self._entered:
            self._entered = False
            super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._pauses or not self._alive:
            return func(*args, **kwargs)
        mode = _mode()
        result = func(*args, **kwargs)
        if is_computation(func, result):
            self._compare(function_name(func), args, kwargs, mode, result)
        elif func in READS or func in COMPARISONS:
            self._take_read(read_key(self.numbers, func, args), args[0]._version, result)
        return result

    def _enter_function(self, cls: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compares the entry into an ``autograd.Function``, whose forward follows call by call."""
        if not self._pauses and self._alive:
            self._compare(f"{cls.__module__}.{cls.__qualname__}.apply", args, {}, _mode(), None)
        return args

    def _enter_scripted(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = _mode()
        result = function(*args, **kwargs)
        if not self._pauses and self._alive:
            self._compare(name, args, kwargs, mode, result)
        return result

    def _enter_compiled(self) -> None:
        """A function under ``torch.compile`` must not meet this mode: it would be compiled into it, or fail to be."""
        if self._pauses and self._alive:
            return
        self.give_up("a function under torch.compile runs, and its calls cannot be seen")
        if self._entered:
            withdraw(self)
            self._entered = False

    def give_up(self, difference: str) -> None:
        """The run does something that cannot be compared."""
        if self._alive:
            self._alive, self.difference = [], difference

    def finish(self) -> int | None:
        """Ends the comparison: the index of the stream that the run equals, or None."""
        self._keep(self._end_differs)
        self.matched = self._alive[0] if self._alive else None
        return self.matched

    def _keep(self, differs: Callable[[CallStream, dict[str, Any]], str]) -> None:
        """Drops the streams from which the run differs."""
        kept = []
        for index in self._alive:
            said = differs(self._streams[index], self._values[index])
            if said:
                self.difference = said
            else:
                kept.append(index)
        self._alive = kept

    def _compare(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: tuple[Any, ...], result: Any
    ) -> None:
        given = flatten(args, kwargs, mode)
        fresh = [value for value in given if isinstance(value, torch.Tensor) and self.numbers.is_new(value)]
        made = [result] if isinstance(result, torch.Tensor) else list(tensors_in(result))
        for tensor in (*fresh, *made):
            self.numbers.of(tensor)
        kept = []
        for index in self._alive:
            said = self._step_differs(index, name, given, fresh, made)
            if said:
                self.difference = said
            else:
                kept.append(index)
        self._alive = kept
        for index in kept:
            action = self._on_result[index].get(self._position)
            if action is not None and made:
                action(made[0])
        self._position += 1

    def _step_differs(
        self, index: int, name: str, given: list[Any], fresh: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> str:
        calls, values = self._streams[index].calls, self._values[index]
        if self._position >= len(calls):
            return f"the run calls {name} where the recorded program had ended"
        call = calls[self._position]
        said = self._call_differs(call, name, given, values)
        if not said and fresh:
            said = self._others_differ(self._streams[index], fresh, values)
        if not said and call.sizes:
            said = self._sizes_differ(call, made, values)
        return f"{said}   at {call.where}" if said and call.where else said

    def _call_differs(self, call: Call, name: str, given: list[Any], values: Mapping[str, Any]) -> str:
        if name != call.function:
            return f"the run calls {name}, recorded was {call.function}"
        if len(given) != len(call.operands):
            return f"{name} is given {len(given)} operands, recorded were {len(call.operands)}"
        for value, (kind, recorded) in zip(given, call.operands):
            if kind == "tensor":
                same = isinstance(value, torch.Tensor) and recorded in self.numbers.of(value)
            elif kind == "value":
                same = value is recorded or same_value(value, recorded)
            else:
                same = same_number(value, evaluate(recorded, values), exact=kind == "size")
            if not same:
                return f"{name} is given {_short(value)}, recorded was {_short(recorded)}"
        return ""

    def _leaf_differs(self, stream: CallStream, layout: Layout, tensor: torch.Tensor, values: dict[str, Any]) -> str:
        if stream.mutates:
            owner = self._leaf_storages.setdefault(tensor.untyped_storage().data_ptr(), layout.name)
            if owner != layout.name:
                return f"{layout.name} shares memory with {owner}, and the program writes to its inputs"
        return layout_differs(layout, tensor, values)

    def _others_differ(self, stream: CallStream, fresh: Sequence[torch.Tensor], values: dict[str, Any]) -> str:
        for tensor in fresh:
            layout = stream.others.get(self.numbers.of(tensor)[0])
            said = "a tensor from outside is new" if layout is None else layout_differs(layout, tensor, values)
            if said:
                return said
        return ""

    def _sizes_differ(self, call: Call, made: Sequence[torch.Tensor], values: dict[str, Any]) -> str:
        for tensor, sizes in zip(made, call.sizes):
            if sizes and not _take(sizes, tensor.shape, values):
                return f"{call.function} gives a tensor of shape {tuple(tensor.shape)}, recorded was {_short(sizes)}"
        return ""

    def _take_read(self, key: tuple[Any, ...], version: int, result: Any) -> None:
        """Notes the value of data that the program reads, for the symbols that stand for it."""
        ambiguous = self._read.setdefault(key, version) != version
        for place, value in enumerate(_numbers_in(result)):
            for index in self._alive:
                for symbol in self._symbols[index].get((key, place), ()):
                    self._values[index][symbol] = math.nan if ambiguous else value

    def _end_differs(self, stream: CallStream, values: dict[str, Any]) -> str:
        if self._position < len(stream.calls):
            call = stream.calls[self._position]
            return f"the run ends before {call.function}" + (f"   at {call.where}" if call.where else "")
        for question, answer in stream.facts:
            found = evaluate(question, values)
            if found is None or bool(found) is not answer:
                return f"recorded was {question} -> {answer}, the run has {found}"
        return ""


def layout_differs(layout: Layout, tensor: torch.Tensor, values: dict[str, Any]) -> str:
    """In which respect `tensor` is not what the trace took for granted, or ''; notes its sizes in `values`."""
    found = (tensor.dtype, tensor.device.type, tensor.requires_grad, tensor.dim())
    if found != (layout.dtype, layout.device, layout.requires_grad, len(layout.sizes)):
        return f"{layout.name} is {found}, recorded was {(layout.dtype, layout.device, layout.requires_grad)}"
    if not _take(layout.sizes, tensor.shape, values):
        return f"{layout.name} has shape {tuple(tensor.shape)}, recorded was {_short(layout.sizes)}"
    laid = [stride for stride, size in zip(layout.strides, tensor.shape) if size != 1]
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]
    if not _take(laid, strides, values):
        return f"{layout.name} has strides {tensor.stride()}, recorded was {_short(layout.strides)}"
    return ""


def _take(expressions: Sequence[Any], sizes: Sequence[int], values: dict[str, Any]) -> bool:
    """Gives each symbol that stands by itself its value; whether every expression then has the size it should."""
    for expression, size in zip(expressions, sizes):
        name = symbol_name(expression)
        if name is not None:
            values.setdefault(name, size)
    return all(evaluate(expression, values) == size for expression, size in zip(expressions, sizes))


def same_value(value: Any, recorded: Any) -> bool:
    """Whether two Python operands are the same to torch: 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    if value is recorded:
        return True
    if type(value) is not type(recorded):
        return False
    if isinstance(value, float):
        return value == recorded and (value != 0 or math.copysign(1, value) == math.copysign(1, recorded))
    if isinstance(value, torch.device):
        return bool(value.type == recorded.type)
    if hasattr(value, "__array_interface__"):
        return value.dtype == recorded.dtype and value.shape == recorded.shape and value.tobytes() == recorded.tobytes()
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return same_function(value, recorded)
    same = value == recorded
    return same is True


def same_function(value: Any, recorded: Any) -> bool:
    """Whether two Python functions do the same: the same code, on the same values of the variables around it."""
    if isinstance(value, types.MethodType):
        return value.__self__ is recorded.__self__ and same_function(value.__func__, recorded.__func__)
    if value.__code__ is not recorded.__code__:
        return False
    cells = zip(value.__closure__ or (), recorded.__closure__ or ())
    return all(
        same_value(a.cell_contents, b.cell_contents) for a, b in cells if isinstance(a.cell_contents, (int, float, str))
    )


def _mode() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), autocast_state()


def _inverse(reads: Mapping[str, Any]) -> dict[Any, list[str]]:
    places: dict[Any, list[str]] = {}
    for name, place in reads.items():
        places.setdefault(place, []).append(name)
    return places


def same_number(value: Any, expected: Any, *, exact: bool) -> bool:
    """Whether a number computed by the program is the one that its formula gives.

    A formula for a float may round in another order than the program; zero is exact.
    """
    if expected is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if exact or value == 0 or expected == 0:
        return bool(value == expected)
    return math.isclose(value, expected, rel_tol=1e-12)


def _numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers_in(item)
    else:
        yield int(value) if isinstance(value, bool) else value


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "another tensor"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
