"""Counting what really runs: a dispatch mode that writes every FLOP of a forward and its backward on a tape.

The mode only looks: each operator runs as it would have run. The backward is observed through hooks on the graph's
nodes, so that the caller may use ``loss.backward()``, ``torch.autograd.grad`` or an engine of his own.

Tried with torch 2.11 and 2.13. Private names used here: `torch.utils._python_dispatch` and `torch.utils.weak`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from gradprune.counting.rules import count_operator, derive_backward
from gradprune.flops import Phases

MODE_SENSITIVE = ("CumprodBackward", "MaskedFillBackward", "ProdBackward")
"""Nodes whose formula torch changes, and rounds differently, while any dispatch mode is on; they contain no product."""

Phase = Literal["forward", "backward", "compiled backward"]


@dataclass(frozen=True)
class Operator:
    """One counted call. derived: FLOPs of its backward, from which of its inputs need a gradient."""

    name: str
    flops: int
    derived: int = 0


@dataclass
class Tape:
    """The counted calls of one microbatch.

    awaits_backward: hooks are set, or there is nothing to set them on. saw_backward: they have begun to fire.
    """

    forward: list[Operator] = field(default_factory=list)
    backward: list[Operator] = field(default_factory=list)
    recompute: list[Operator] = field(default_factory=list)
    awaits_backward: bool = False
    saw_backward: bool = False

    def measured(self) -> Phases:
        return Phases(*(sum(op.flops for op in ops) for ops in (self.forward, self.backward, self.recompute)))

    def derived(self) -> Phases:
        """Forward as counted, backward derived from it; no recomputation."""
        return Phases(sum(op.flops for op in self.forward), sum(op.derived for op in self.forward))


class _Marks:
    """A set of tensors, closed under operators: whatever is computed from a marked tensor is marked."""

    def __init__(self, seed_by_attribute: bool) -> None:
        self._seed_by_attribute = seed_by_attribute
        self._tensors = WeakTensorKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors[tensor] = True

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        return (self._seed_by_attribute and value.requires_grad) or value in self._tensors

    def flow(self, func: Any, args: Any, out: Any) -> None:
        if func.overloadpacket is torch.ops.aten.detach or not any(leaf in self for leaf in tree_leaves(args)):
            return
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.add(leaf)


class _CountingMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, marks: _Marks, tape: Tape, phase: Phase) -> None:
        super().__init__()
        self._marks, self._tape, self._phase = marks, tape, phase

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled code stays compiled; the matrix products that it calls are seen.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Composite operators arrive whole in inference mode.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        flops = count_operator(func.overloadpacket, args, kwargs, out)
        if flops is not None:
            self._write(func, args, out, flops)
        self._marks.flow(func, (args, kwargs), out)
        return out

    def _write(self, func: Any, args: Sequence[Any], out: Any, flops: int) -> None:
        packet = func.overloadpacket
        needed = [argument in self._marks for argument in args]
        if self._phase == "forward":
            derived = derive_backward(packet, args, out, flops, needed)
            self._tape.forward.append(Operator(packet.__name__, flops, derived))
        elif any(needed) or self._phase == "compiled backward":
            self._tape.backward.append(Operator(packet.__name__, flops))
        else:
            # No cotangent goes in: the operator belongs to a forward that is run again.
            self._tape.recompute.append(Operator(packet.__name__, flops))


@contextmanager
def record_forward(tape: Tape) -> Iterator[None]:
    """Write the counted operators run inside on `tape`. In a ``no_grad`` region gradients are inferred: whatever is
    computed from a tensor that requires grad is taken to need one."""
    with _CountingMode(_Marks(seed_by_attribute=True), tape, "forward"):
        yield


def record_backward(tape: Tape, loss: torch.Tensor) -> None:
    """Write the counted operators of every later backward through `loss` on `tape`. Changes no graph and no value."""
    tape.awaits_backward = True
    marks, seen, pending = _Marks(seed_by_attribute=False), set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        # An AccumulateGrad outlives the graph and counts nothing.
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        pending += [successor for successor, _ in node.next_functions]
        if node.name().startswith(MODE_SENSITIVE):
            continue
        span = _NodeSpan(marks, tape, compiled=node.name() == "CompiledFunctionBackward")
        node.register_prehook(span.enter)
        node.register_hook(span.leave)


class _NodeSpan:
    """Counts while one node of the graph computes. The engine restores the mode stack itself where a node raises."""

    def __init__(self, marks: _Marks, tape: Tape, compiled: bool) -> None:
        self._marks, self._tape = marks, tape
        # Fused kernels hide the flow of cotangents from one product to the next.
        self._phase: Phase = "compiled backward" if compiled else "backward"

    def enter(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        self._tape.saw_backward = True
        for cotangent in cotangents:
            if cotangent is not None:
                self._marks.add(cotangent)
        _push_mode(_CountingMode(self._marks, self._tape, self._phase))

    def leave(self, *_: Any) -> None:
        _pop_mode()
