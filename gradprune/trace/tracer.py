"""The graph of what a traced program dispatches: functional, decomposed, each node with the user's line."""

from __future__ import annotations

import contextlib
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


def add_number(function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
    """Adds a node to the graph being traced: `result`, a symbolic number, is ``function(*args)``."""
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer
    proxies = tuple(
        get_proxy_slot(arg, tracer).force() if isinstance(arg, (torch.SymInt, torch.SymFloat)) else arg for arg in args
    )
    track_tensor_tree(result, tracer.create_proxy("call_function", function, proxies, {}), constant=None, tracer=tracer)


@contextlib.contextmanager
def capturing(tracer: LineTracer, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Everything dispatched inside is functionalised, decomposed and written to the tracer's graph."""
    with (
        torch.autograd.set_multithreading_enabled(False),
        fake_mode,
        enable_python_dispatcher(),
        disable_autocast_cache(),
        ProxyTorchDispatchMode(tracer, "symbolic"),
        decompose(DECOMPOSITIONS),
        FunctionalTensorMode(_allow_token_discovery=True),
    ):
        yield
