"""Record a tape while a step really runs.

What a recording cannot know in general, it guesses: a Python int that equals a size is taken for that size. Whoever
uses a proof of a tape must compare the running step's calls with it (`watch.TapeWatch`), which shows a wrong guess as
a difference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradprune.errors import TraceError
from gradprune.frames import user_line
from gradprune.runtime.collectives import reported
from gradprune.runtime.data_numbers import DataFloat, DataInt, Formula, Recording, marked, plain, unmarked
from gradprune.runtime.ledger import Ledger
from gradprune.runtime.tape import Entry, Leaf, Ref, Size, Tape, autocast_state, kind_of, tensors_in
from gradprune.trace.modes import suspended

#: Calls whose ints are sizes, counts or scalars, never dimension numbers: only there is an int read as a size.
_SIZED = frozenset(
    """view reshape expand zeros ones full empty arange randn rand randint randperm new_zeros new_ones new_full
    new_empty unflatten __getitem__ __setitem__ split repeat mul div true_divide add sub rsub rdiv __rdiv__ __rtruediv__
    __truediv__ __mul__ __rmul__ __add__ __radd__ __sub__ __rsub__ mul_ div_ add_ sub_ clamp clamp_min zeros_like
    full_like __floordiv__ repeat_interleave linspace eye bincount one_hot""".split()
)

#: Queries: they give Python values or change nothing that a gradient could see.
_QUERIES = frozenset(
    """size dim ndimension numel nelement is_floating_point is_complex stride storage_offset data_ptr is_contiguous
    __len__ __bool__ __repr__ __format__ __hash__ tolist numpy __array__ equal allclose is_same_size element_size
    get_device untyped_storage storage __reduce_ex__ __deepcopy__ is_nonzero __contains__ _set_grad_enabled __int__
    __float__ __index__ backward is_inference result_type can_cast is_tensor is_signed __dlpack__""".split()
)

#: Calls that let the user see gradients of tensors outside the model.
_LISTENING = frozenset(["register_hook", "retain_grad", "register_post_accumulate_grad_hook"])

#: Calls that give no tensor and yet change what a gradient is.
EFFECTS = frozenset(["__setitem__", "__set__", "register_hook", "register_post_accumulate_grad_hook"])


class CallObserver(TorchFunctionMode):
    """Shows each torch call of the user's code to `observe`, once: what a call does inside is its own affair."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = self._elsewhere = 0
        self.applied_functions: set[Any] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls made inside are not observed."""
        self._paused += 1
        self._elsewhere += 1
        try:
            with suspended(self), _unpatched():
                yield
        finally:
            self._paused -= 1
            self._elsewhere -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, getattr(func, "__name__", str(func)), args, kwargs or {})

    def call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        if self._paused:
            return func(*args, **kwargs)
        if name == "backward":
            self.backward_begins()
        if name in _QUERIES:
            return func(*plain(args), **plain(kwargs))
        self._paused += 1
        try:
            return self.observe(func, name, args, kwargs)
        finally:
            self._paused -= 1

    def observe(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def written(self, tensors: list[torch.Tensor]) -> None:
        """A collective that the user's code issued writes to `tensors`."""
        raise NotImplementedError

    def backward_begins(self) -> None:
        """The user's code calls backward before the microbatch is at its end."""
        raise NotImplementedError

    def _communicated(self, tensors: list[torch.Tensor]) -> None:
        if not self._elsewhere:  # torch hands collectives to a function mode too: they run inside a call observed
            self.written(tensors)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe all calls made inside, ``autograd.Function.apply`` among them, which no function mode sees."""
        watching = weakref.ref(self)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            observer = watching()
            function = _APPLY.__get__(None, cls)
            return function(*args, **kwargs) if observer is None else observer.applied(cls, function, args, kwargs)

        with self, reported(self._communicated), _patched(classmethod(apply)):
            yield

    def applied(self, cls: type, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.applied_functions.add(cls)
        return self.call(function, f"{cls.__name__}.apply", args, kwargs)


_APPLY = torch.autograd.Function.__dict__["apply"]


@contextmanager
def _patched(apply: Any) -> Iterator[None]:
    before = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


def _unpatched() -> Any:
    """Code that is compiled inside keeps the method that it finds."""
    return _patched(_APPLY)


class Recorder(CallObserver):
    """Records a Tape while `observing`. One use; only calls of this thread are seen.

    named: tensors of the batch by name. parameters: names of the model's parameters by ``id``.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], parameters: Mapping[int, str]) -> None:
        super().__init__()
        self._entries: list[Entry] = []
        self._leaves: list[Leaf] = []
        self._names = {id(tensor): name for name, tensor in named.items()}
        self._parameters = parameters
        self._outputs: dict[int, str] = {}
        self._ledger = Ledger()
        self._count = 0
        self._held: dict[int, torch.Tensor] = {}
        self._recording = Recording()
        self._refused: TraceError | None = None
        self.communicates = False
        self._edges: dict[int, GradientEdge] = {}
        self.entrances: dict[int, GradientEdge] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        self._recording.open = True
        try:
            with super().observing():
                yield
        finally:
            self._recording.open = False

    def add_output(self, name: str, tensor: torch.Tensor) -> None:
        """Declare a tensor that a module of the model returned."""
        if self._ledger.ever(tensor) is None:
            self._outputs[id(tensor)] = name
            self._number(tensor)

    def backward_begins(self) -> None:
        self._refuse("a backward runs inside the microbatch, before its own")

    def _refuse(self, why: str) -> None:
        """This run cannot be proved; the user's code goes on."""
        if self._refused is None:
            self._refused = TraceError(why, user_line())

    def release(self) -> None:
        """Let go of all tensors; nothing can be asked afterwards."""
        self._held.clear()
        self._edges.clear()
        self.entrances.clear()

    def leaf_tensor(self, leaf: Leaf) -> torch.Tensor:
        """The real tensor of a leaf of this recording."""
        return self._held[leaf.number]

    def finish(self, loss: torch.Tensor) -> tuple[Tape, list[torch.Tensor]]:
        """The tape up to `loss`, without what the loss does not depend on, and the real tensors of its leaves.

        From then on `entrances` says where gradient would come to those leaves.
        """
        if self._refused is not None:
            raise self._refused
        tape, kept = Tape(self._entries, self._leaves, self._number(loss)).sliced()
        # Numbered as the leaves of the tape, which is sliced.
        numbered = zip((leaf.number for leaf in tape.leaves), kept)
        self.entrances = {number: self._edges[old] for number, old in numbered if old in self._edges}
        return tape, [self._held[number] for number in kept]

    def observe(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        if name in _LISTENING:
            self._refuse(f"{name} on a tensor of the step: what it is told of a gradient would be missed")
        grad, autocast = torch.is_grad_enabled(), autocast_state()
        spec = self._spec(args, name), self._spec(kwargs, name)
        result = func(*plain(args), **plain(kwargs))
        tensors = tensors_in(result)
        if name == "item":
            return marked(result, Formula(None, source=self._number(args[0])), self._recording)
        if not tensors and name not in EFFECTS:
            return result
        mutates = self._ledger.accept_writes(tensors_in((args, kwargs)))
        results = tuple(self._result(tensor) for tensor in tensors)
        self._entries.append(Entry(func, *spec, results, mutates, grad, autocast, user_line()))
        return result

    def written(self, tensors: list[torch.Tensor]) -> None:
        self.communicates = True
        self._ledger.void(tensors)

    def _result(self, tensor: torch.Tensor) -> int:
        known = self._ledger.number(tensor)
        return self._append(tensor) if known is None else known

    def _append(self, tensor: torch.Tensor) -> int:
        self._ledger.assign(tensor, self._count)
        self._count += 1
        return self._count - 1

    def _number(self, tensor: torch.Tensor) -> int:
        """Number of a tensor; one never seen, or written to behind the recording's back, becomes a leaf."""
        known = self._ledger.number(tensor)
        if known is not None:
            return known
        before = self._ledger.ever(tensor)
        number = self._append(tensor)
        self._held[number] = tensor
        self._leaves.append(self._leaf(tensor, number, hidden=before is not None or self._ledger.spoiled(tensor)))
        return number

    def _leaf(self, tensor: torch.Tensor, number: int, hidden: bool) -> Leaf:
        if hidden and tensor.requires_grad:
            self._refuse("a tensor with a gradient was changed in a way that no torch call shows")
        name, found = "outside", "state"
        if id(tensor) in self._parameters:
            name = f"parameters.{self._parameters[id(tensor)]}"
        elif not hidden and id(tensor) in self._outputs:
            name, found = self._outputs[id(tensor)], "input"
        elif not hidden and id(tensor) in self._names:
            name, found = self._names[id(tensor)], "input"
        if tensor.requires_grad:
            self._edges[number] = get_gradient_edge(tensor)
        return Leaf(name, "wrt" if tensor.requires_grad else found, number, kind_of(tensor))

    def _spec(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self._number(value))
        if isinstance(value, DataFloat | DataInt):
            return unmarked(value, self._recording)
        if isinstance(value, int) and not isinstance(value, bool) and name in _SIZED:
            return self._size(value)
        if isinstance(value, slice):
            return slice(*(self._spec(part, name) for part in (value.start, value.stop, value.step)))
        if isinstance(value, list | tuple):
            items = [self._spec(item, name) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._spec(item, name) for key, item in value.items()}
        return value

    def _size(self, value: int) -> Any:
        """A guess which sizes an int stands for; the value itself if none fits. First leaves first."""
        sign, wanted = (1, value) if value > 0 else (-1, -value)
        if wanted < 2:
            return value
        extents = {
            (leaf.number, dim): size
            for leaf in self._leaves
            for dim, size in enumerate(self._held[leaf.number].shape)
            if type(size) is int and size > 1
        }
        for offset in (0, 1, -1):
            for place, extent in extents.items():
                if extent + offset == wanted:
                    return Size((place,), offset, sign)
        for first, extent in extents.items():
            for second, other in extents.items():
                if first[0] == second[0] and first[1] < second[1] and extent * other == wanted:
                    return Size((first, second), 0, sign)
        return value
