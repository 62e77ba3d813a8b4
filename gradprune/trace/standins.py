"""What stands in, while a trace runs, for Python and torch functions that need data or hide what they compute.

Everything here is undone when the trace ends. The globals of the user's modules are touched only where a traced
program was seen to turn a symbolic number into a Python one: there ``int``, ``float``, ``len``, ``max``, ``min``
and `math` keep it symbolic.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch._functorch.utils
import torch.distributed
import torch.utils.checkpoint
from torch._dynamo import eval_frame
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from gradprune.calls import tensors_in
from gradprune.trace.tracer import floor_division, number_of_data
from gradprune.trace.unknown import Unknown, first_unknown, is_program_file

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Observer(Protocol):
    def enter_function(self, cls: type, args: tuple[Any, ...]) -> tuple[Any, ...]: ...

    def enter_scripted(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def in_backward(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any: ...

    def forget(self, tensors: Sequence[torch.Tensor], what: str) -> None: ...

    def recording_no_grad(self) -> contextlib.AbstractContextManager[None]: ...


class _NumberType(type):
    """The type of a stand-in for ``int`` or ``float``: it makes and recognises what the builtin does, and symbols."""

    builtin: type
    symbol: type
    convert: Callable[[Any], Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, torch.Tensor):
            value = value.item()
        if isinstance(value, SYMBOLIC):
            return cls.convert(value)
        if isinstance(value, Unknown):
            return value
        return cls.builtin(*((value,) if isinstance(value, (int, float)) else args), **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.builtin, cls.symbol))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.builtin)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.builtin

    def __hash__(cls) -> int:
        return hash(cls.builtin)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.builtin, name)


class _Int(metaclass=_NumberType):
    builtin, symbol, convert = int, torch.SymInt, staticmethod(torch.sym_int)


class _Float(metaclass=_NumberType):
    builtin, symbol, convert = float, torch.SymFloat, staticmethod(torch.sym_float)


def _len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() > 0 else builtins.len(value)


def _extremum(builtin: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    """``max`` or ``min`` that does not branch on a symbolic number; numbers of two kinds keep theirs, and branch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and any(isinstance(arg, SYMBOLIC) for arg in args):
            for kind in ((int, torch.SymInt), (float, torch.SymFloat)):
                if all(type(arg) in kind for arg in args):
                    return symbolic(*args)
        return builtin(*args, **kwargs)

    return call


_BUILTINS: dict[str, Any] = {
    "int": _Int,
    "float": _Float,
    "len": _len,
    "max": _extremum(builtins.max, torch.sym_max),
    "min": _extremum(builtins.min, torch.sym_min),
}


def _math_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` that gives a new number, and a node of the graph, for a symbolic one."""

    def call(*args: Any) -> Any:
        unknown = first_unknown(args)
        if unknown is not None:
            return unknown
        if not any(isinstance(arg, SYMBOLIC) for arg in args) or function in (math.floor, math.ceil, math.trunc):
            return function(*args)
        return number_of_data(function, args)

    return call


_MATH = types.SimpleNamespace(
    **{name: _math_function(value) if callable(value) else value for name, value in vars(math).items()}
)


def _replacements(module: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in _BUILTINS.items() if name not in module}
    for name, value in module.items():
        if value is math:
            found[name] = _MATH
        elif isinstance(value, types.BuiltinFunctionType) and value.__module__ == "math":
            found[name] = _math_function(value)
    return found


@contextlib.contextmanager
def symbolic_builtins(modules: Sequence[dict[str, Any]]) -> Iterator[None]:
    """The stand-ins for builtins and for `math` in the modules with these globals keep symbolic numbers symbolic."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            replacements = _replacements(module)
            before = {name: module[name] for name in replacements if name in module}
            stack.callback(_restore, module, replacements, before)
            module.update(replacements)
        yield


def _restore(module: dict[str, Any], replacements: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in replacements.items():
        if module.get(name) is value:
            del module[name]
    module.update(before)


def _truth(tensor: torch.Tensor) -> bool:
    return bool(tensor.item())  # torch's own wants the number, not only whether it is zero


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all().item())


def _all_close(*args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all().item())


def _deep_copy(tensor: torch.Tensor, memo: Any) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


#: What runs in place of torch's functions of these names.
TORCH_FUNCTIONS = {"__bool__": _truth, "equal": _equal, "allclose": _all_close, "__deepcopy__": _deep_copy}


def _checkpoint_function(observer: _Observer) -> Any:
    """Reentrant checkpointing without the recomputation: the same values, the same gradients."""
    original = torch.utils.checkpoint.CheckpointFunction

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        _, _, *given = observer.enter_function(original, (function, preserve_rng_state, *args))
        tracked = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in given)
        with observer.recording_no_grad(), contextlib.nullcontext() if tracked else torch.no_grad():
            return function(*given)

    return types.SimpleNamespace(apply=apply)


def _checkpoint_generator(*_: Any, **__: Any) -> Iterator[None]:
    """Non-reentrant checkpointing without the recomputation."""
    yield


def _formatted(value: Any, spec: str) -> str:
    return f"<{value!s}>"


# Methods that FunctionalTensor replaces for the sake of export: the calls seen must be those of the program.
_OWN_METHODS = "tolist to cuda cpu char bfloat16 byte double float bool half int long to_dense __bool__".split()


@contextlib.contextmanager
def standing_in(observer: _Observer) -> Iterator[None]:
    """Compiled and scripted functions run as Python, checkpoints do not recompute, symbols can be formatted.

    `observer` sees, and may replace, the arguments of each ``autograd.Function``, and calls their backwards.
    """
    run_backward = BackwardCFunction.apply

    def backward(ctx: Any, *args: Any) -> Any:
        return observer.in_backward(run_backward, (ctx, *args))

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.utils.checkpoint, "CheckpointFunction", _checkpoint_function(observer)),
            (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint_generator),
            (BackwardCFunction, "apply", backward),
            *((FunctionalTensor, name, getattr(torch.Tensor, name)) for name in _OWN_METHODS),
            *((symbol, "__floordiv__", floor_division(symbol.__floordiv__)) for symbol in SYMBOLIC[:2]),
            *((symbol, "__rfloordiv__", floor_division(symbol.__rfloordiv__, swapped=True)) for symbol in SYMBOLIC[:2]),
            *((symbol, "__format__", _formatted) for symbol in SYMBOLIC),
            *((symbol, "__getattribute__", _posing_as(kind)) for symbol, kind in zip(SYMBOLIC, (int, float, bool))),
        ):
            stack.enter_context(_patched(owner, name, value))
        stack.enter_context(watching_functions(observer.enter_function))
        stack.enter_context(watching_scripted(observer.enter_scripted))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.distributed.is_available():
            stack.enter_context(_no_collectives(observer))
        stack.enter_context(_same_random_state())
        yield


# The methods of a process group, by where the tensors that they write are among their arguments.
_WRITES_FIRST = """allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base
    allgather_into_tensor_coalesced reduce reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced broadcast
    gather scatter alltoall alltoall_base recv recv_anysource""".split()
_WRITES_NOTHING = "send barrier monitored_barrier".split()


@contextlib.contextmanager
def _no_collectives(observer: _Observer) -> Iterator[None]:
    """Collectives exchange nothing: what they would have written is unknown."""

    def silent(name: str, *, writes: bool) -> Callable[..., None]:
        def collective(group: Any, tensors: Any = (), *_: Any, **__: Any) -> None:
            if writes:
                observer.forget(list(tensors_in(tensors)), name)

        return collective

    group = torch.distributed.ProcessGroup
    with contextlib.ExitStack() as stack:
        for name in (*_WRITES_FIRST, *_WRITES_NOTHING):
            if hasattr(group, name):
                stack.enter_context(_patched(group, name, silent(name, writes=name in _WRITES_FIRST)))
        yield


@contextlib.contextmanager
def watching_functions(on_function: Callable[[type, tuple[Any, ...]], tuple[Any, ...]]) -> Iterator[None]:
    """Calls ``on_function(cls, args)`` for each ``cls.apply(*args)`` of a ``torch.autograd.Function``; it returns the
    arguments to use. A function mode sees only what such a function calls inside."""
    original = torch._functorch.utils.unwrap_dead_wrappers

    def unwrap(args: tuple[Any, ...]) -> tuple[Any, ...]:
        caller = sys._getframe(1)
        args = original(args)
        if caller.f_code is torch.autograd.Function.apply.__func__.__code__:  # type: ignore[attr-defined]
            return on_function(caller.f_locals["cls"], args)
        return args

    with _patched(torch._functorch.utils, "unwrap_dead_wrappers", unwrap):
        yield


@contextlib.contextmanager
def watching_scripted(on_call: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Lets ``on_call(name, function, args, kwargs)`` make each call of a scripted function, whose inside no mode sees.

    `function` is what is to be called: the scripted function itself, bound to its own implementation.
    """
    original = torch.jit.ScriptFunction.__call__

    def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        return on_call(f"{scripted.qualified_name} scripted", functools.partial(original, scripted), args, kwargs)

    with _patched(torch.jit.ScriptFunction, "__call__", call):
        yield


def source_of(scripted: functools.partial[Any]) -> Callable[..., Any]:
    """The Python function that was scripted, or the scripted one where it is not known."""
    return getattr(scripted.args[0], "_torchdynamo_inline", None) or scripted


@contextlib.contextmanager
def watching_compiled(on_call: Callable[[], None]) -> Iterator[None]:
    """Calls ``on_call()`` before each call of a function under ``torch.compile``, which looks at the modes in force."""
    original = eval_frame._callback_from_stance

    def callback(compiler: Any) -> Any:
        if callable(compiler):
            on_call()
        return original(compiler)

    with _patched(eval_frame, "_callback_from_stance", callback):
        yield


def withdraw(mode: TorchFunctionMode) -> None:
    """Takes `mode` off the stack of function modes for good, wherever it stands there."""
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for top in reversed(above):
        _push_mode(top)


def _posing_as(number: type) -> Callable[[Any, str], Any]:
    """The attributes of a symbolic number; to user code it is an instance of the number that it stands for."""

    def attribute(symbol: Any, name: str) -> Any:
        if name == "__class__" and is_program_file(sys._getframe(1).f_code.co_filename):
            return number
        return object.__getattribute__(symbol, name)

    return attribute


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """A traced program draws from no generator of the process."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
