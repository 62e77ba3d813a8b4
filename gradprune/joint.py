"""A traced step as data: the joint forward-and-backward graph, who its inputs are, and the torch calls that made it.

`trace` makes these, `passes` read them, `step` compares a running program with a `CallStream`. Public torch names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.fx

from gradprune.facts import SourceLine


@dataclass(frozen=True)
class TracedInput:
    """A placeholder of the joint graph.

    role: ``wrt`` (depends on the model: a gradient output exists), ``input`` (an argument or part of one), ``state``
        (a tensor that the program found in a closure, a global or a module: its value is unknown to the proof), or
        ``tangent`` (the cotangent of an output).
    name: the user's name for it, ``"logp"`` or ``"batch.advantages"``; for a tangent, that of the output.
    """

    name: str
    role: Literal["wrt", "input", "state", "tangent"]
    node: torch.fx.Node


@dataclass(frozen=True)
class Call:
    """One torch call of the program as its Python source made it.

    operands: tuple of what it was given, flattened: ("tensor", k) for a tensor, k numbering tensors by first
        appearance; ("value", v) for a Python value; ("size", expr) for a number computed from sizes; ("data", expr) for
        one that depends on data. The first two are the grad mode and the autocast settings of the call.
    sizes: of each tensor in the result, its sizes where only data determines them; () for every other.
    """

    function: str
    operands: tuple[tuple[Any, ...], ...]
    where: SourceLine | None = None
    sizes: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Layout:
    """What a trace took for granted of a tensor that the program did not make; sizes and strides are expressions."""

    name: str
    dtype: torch.dtype
    device: str
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class CallStream:
    """All torch calls of one path through the program, in order. Runs with equal streams compute the same thing.

    leaves: the tensors that the program is given, numbered 0, 1, ... in this order.
    others: by number, the tensors that it found elsewhere.
    facts: questions about sizes and data, as expressions, and their answers on this path; not a < b is not b <= a.
    reads: where a symbol of these expressions comes from: its name -> (what was read, index in the flattened value).
    mutates: whether a call of the path changes a leaf or another tensor from outside.
    """

    calls: tuple[Call, ...]
    leaves: tuple[Layout, ...] = ()
    others: Mapping[int, Layout] = field(default_factory=dict)
    facts: tuple[tuple[Any, bool], ...] = ()
    reads: Mapping[str, tuple[tuple[Any, ...], int]] = field(default_factory=dict)
    mutates: bool = False


@dataclass
class JointGraph:
    """One path of a step, forward and backward in one graph.

    graph_module: ATen operators; each node's ``meta["val"]`` is a fake tensor, ``meta["where"]`` its SourceLine (the
        user's line, on forward and backward nodes alike) and ``meta["call"]`` the index of its call in `stream`
        (forward nodes only).
    gradients: name of each ``wrt`` input -> its gradient node, or None where nothing reaches it.
    branches: the data-dependent decisions of this path, for a reader: ``"if count > 0 -> True"`` with its line.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[TracedInput, ...]
    gradients: dict[str, torch.fx.Node | None]
    stream: CallStream
    shape_env: Any
    branches: tuple[tuple[str, SourceLine | None], ...] = ()
    symbolic: tuple[str, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)
