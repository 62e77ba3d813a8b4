"""What a step computed, as data that can be played again on other tensors.

A tape holds the torch calls that the user's code made outside the model, in order, with their operands by identity.
Playing it is a straight-line program from the model's outputs to the loss: it can be traced without running the user's
code a second time, so that counters, logs and collectives of a step happen once. `recorder` makes tapes, `watch`
compares a run with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from gradprune.calls import at_line
from gradprune.facts import SourceLine
from gradprune.runtime.data_numbers import Formula


@dataclass(frozen=True)
class Ref:
    """The tensor with this number."""

    number: int


@dataclass(frozen=True)
class Size:
    """``sign * (offset + product of sizes)``, each size a (tensor number, dimension)."""

    sizes: tuple[tuple[int, int], ...]
    offset: int = 0
    sign: int = 1


@dataclass(frozen=True)
class Leaf:
    """A tensor that the calls found ready-made.

    role: ``wrt`` (a gradient may flow into it), ``input`` (part of the batch, or a model output without gradient),
    ``state`` (found elsewhere). name: the user's, or ``"outside"``. kind: dtype, dimensions, type of device.
    """

    name: str
    role: str
    number: int
    kind: tuple[torch.dtype, int, str]


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, int, str]:
    """What of a tensor a proof takes for granted, besides its sizes."""
    return tensor.dtype, tensor.dim(), tensor.device.type


@dataclass(frozen=True)
class Entry:
    """One call: operands as a tree of Ref, Size, Formula and plain values.

    results: numbers of the tensors in what it returns, flattened. mutates: numbers of known tensors it writes to.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    mutates: tuple[int, ...]
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    where: SourceLine | None = field(default=None, compare=False)

    def reads(self) -> set[int]:
        return set(_numbers_in((self.args, self.kwargs)))


@dataclass(frozen=True)
class Tape:
    """`leaves` in order of first use, calls, and the number of the loss."""

    entries: Sequence[Entry]
    leaves: Sequence[Leaf]
    loss: int

    def play(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the loss from `tensors`, one for each leaf, in the order of `leaves`."""
        env: dict[int, Any] = {leaf.number: tensor for leaf, tensor in zip(self.leaves, tensors, strict=True)}
        for entry in self.entries:
            args, kwargs = resolve(entry.args, env), resolve(entry.kwargs, env)
            with at_line(entry.where), _grad(entry.grad), _autocast(entry.autocast):
                result = entry.function(*args, **kwargs)
            env.update(zip(entry.results, tensors_in(result)))
        return env[self.loss]

    def sliced(self) -> tuple[Tape, list[int]]:
        """The part that the loss depends on, renumbered, and the old numbers of its leaves."""
        needed = {self.loss}
        kept: list[Entry] = []
        for entry in reversed(self.entries):
            changes = {*entry.results, *entry.mutates} or entry.reads()  # a hook changes what it is put on
            if changes & needed:
                kept.append(entry)
                needed |= entry.reads() | set(entry.mutates)
        leaves = [leaf for leaf in self.leaves if leaf.number in needed]
        order = [leaf.number for leaf in leaves]
        order += [number for entry in reversed(kept) for number in entry.results]
        new = {old: index for index, old in enumerate(dict.fromkeys(order))}
        entries = tuple(_renumbered(entry, new) for entry in reversed(kept))
        renamed = tuple(replace(leaf, number=new[leaf.number]) for leaf in leaves)
        return Tape(entries, _unique_names(renamed), new[self.loss]), [leaf.number for leaf in leaves]

    def opened(self) -> tuple[Tape, list[float]]:
        """This tape with the Python numbers that scale something left open, and those numbers.

        An open number is the value of a leaf of its own, ``number.k``, which a replay must be given as a 0-dim tensor.
        """
        first = len({*(leaf.number for leaf in self.leaves), *(n for entry in self.entries for n in entry.results)})
        numbers: list[float] = []

        def open_number(value: Any) -> Any:
            if type(value) not in (int, float):
                return value
            numbers.append(float(value))
            return Formula(None, source=first + len(numbers) - 1)

        entries = [
            replace(entry, args=tuple(map(open_number, entry.args))) if _scales(entry) else entry
            for entry in self.entries
        ]
        kind = (torch.float64, 0, "cpu")
        opened = [Leaf(f"{NUMBER}{k}", "state", first + k, kind) for k in range(len(numbers))]
        return Tape(tuple(entries), (*self.leaves, *opened), self.loss), numbers

    def content(self) -> tuple[Any, ...]:
        """Hashable; equal for two recordings of one program, whatever the sizes of its tensors."""
        calls = tuple(
            (call_name(e.function), _frozen(e.args), _frozen(e.kwargs), e.results, e.mutates, e.grad, e.autocast)
            for e in self.entries
        )
        return tuple(self.leaves), calls, self.loss


#: Name of a leaf that holds a number of the user's Python code.
NUMBER = "number."
_SCALING = frozenset("mul mul_ div div_ true_divide __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__".split())


def _scales(entry: Entry) -> bool:
    return getattr(entry.function, "__name__", "") in _SCALING and isinstance(entry.args, tuple)


def _unique_names(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    return tuple(replace(leaf, name=f"outside.{leaf.number}") if leaf.name == "outside" else leaf for leaf in leaves)


def _renumbered(entry: Entry, new: Mapping[int, int]) -> Entry:
    return replace(
        entry,
        args=_renumber(entry.args, new),
        kwargs=_renumber(entry.kwargs, new),
        results=tuple(new[number] for number in entry.results),
        mutates=tuple(new[number] for number in entry.mutates if number in new),
    )


def _renumber(value: Any, new: Mapping[int, int]) -> Any:
    if isinstance(value, Ref):
        return Ref(new[value.number])
    if isinstance(value, Size):
        return replace(value, sizes=tuple((new[number], dim) for number, dim in value.sizes))
    if isinstance(value, Formula):
        source = new[value.source] if value.function is None else -1
        return replace(value, source=source, operands=tuple(_renumber(item, new) for item in value.operands))
    return _mapped(value, lambda item: _renumber(item, new))


def _numbers_in(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.number
    elif isinstance(value, Size):
        yield from (number for number, _ in value.sizes)
    elif isinstance(value, Formula):
        if value.function is None:
            yield value.source
        for operand in value.operands:
            yield from _numbers_in(operand)
    elif isinstance(value, slice):
        yield from _numbers_in((value.start, value.stop, value.step))
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(item)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` on the parts of a list, tuple, dict or slice; anything else as it is."""
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    return value


def resolve(value: Any, env: Mapping[int, Any]) -> Any:
    """An operand tree with tensors from `env` in it."""
    if isinstance(value, Ref):
        return env[value.number]
    if isinstance(value, Size):
        return size_of(value, lambda number, dim: env[number].shape[dim])
    if isinstance(value, Formula):
        return number_of(value, lambda source: env[source].item())
    return _mapped(value, lambda item: resolve(item, env))


def size_of(size: Size, extent: Callable[[int, int], Any]) -> Any:
    product: Any = 1
    for number, dim in size.sizes:
        product = product * extent(number, dim)
    return size.sign * (product + size.offset)


def number_of(formula: Any, item: Callable[[int], Any]) -> Any:
    """The value of a formula (or of a plain number in one); `item` reads a tensor by its number."""
    if not isinstance(formula, Formula):
        return formula
    if formula.function is None:
        return item(formula.source)
    return formula.function(*(number_of(operand, item) for operand in formula.operands))


def call_name(function: Callable[..., Any]) -> str:
    """Tells functions apart by module and name; methods of different owners (a getter, a Function) by the owner."""
    owner = getattr(function, "__self__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    return f"{name} of {owner!r}" if owner is not None else name


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return ("dict", *((key, _frozen(item)) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))))
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    if isinstance(value, Ref | Size | Formula):
        return (type(value).__name__, *(_frozen(getattr(value, part.name)) for part in fields(value)))
    if hasattr(value, "__array_interface__"):
        return (type(value).__name__, str(value.dtype), value.shape, value.tobytes())
    # 0, False and 0.0 are equal to Python, and different operands to torch; NaN differs from itself.
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Device types for which autocast is on, with its dtype."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def _grad(enabled: bool) -> AbstractContextManager[Any]:
    return nullcontext() if enabled else torch.no_grad()


@contextmanager
def _autocast(state: tuple[tuple[str, torch.dtype], ...]) -> Iterator[None]:
    if not state:
        yield
        return
    (kind, dtype), *rest = state
    with torch.autocast(kind, dtype), _autocast(tuple(rest)):
        yield
