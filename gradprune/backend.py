"""``torch.compile(step, backend="gradprune", options={"zero": "advantages * mask"})``: two graphs, live and dead.

torch.compile captures the step once and guards whatever Python state it reads; the loss part of the captured graph is
proved here, and both graphs are compiled by another backend (option ``backend``, "inductor" unless said otherwise) from
the same capture. At run time CPU tensors named in ``zero`` choose between them; torch.compile sees neither the choice
nor a reason to compile again. What cannot be proved, or chosen, is the other backend's graph and nothing else.

Option ``zero`` is required; ``on_violation`` is that of `gradprune.compile`. Private torch names used here, tried with
torch 2.13: ``torch._dynamo.lookup_backend``, ``torch._guards``, ``node.meta["grapharg"]``, ``["example_value"]`` and
``["nn_module_stack"]`` of captured graphs, and the FakeTensorMode.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._dynamo import lookup_backend
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from gradprune.calls import at_line
from gradprune.errors import NoEffectWarning, PruneError
from gradprune.explanation import Decision, Explanation
from gradprune.facts import Dead, Hypothesis, Live, Reason, Refusal, Verdict
from gradprune.frames import source_line
from gradprune.proof import Program, prove_program
from gradprune.runtime.dead import Delivery, gradient_of
from gradprune.runtime.graphs import Arrivals
from gradprune.runtime.guard import Guard, OnViolation, magnitude, watch_optimizers
from gradprune.runtime.known import examine
from gradprune.trace.admission import Admission

_OPTIONS = frozenset(["zero", "backend", "on_violation"])

_REMEMBERED = 10_000

Compiled = Callable[..., Any]


def compile_graph(
    graph_module: torch.fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """The backend that torch.compile calls, once for each graph that it captures."""
    settings = dict(options or {})
    if mode is not None:
        raise PruneError(
            f"mode={mode!r} is the compiler's, and this backend does not pass it on: write "
            f"gradprune.compile(torch.compile(step, mode={mode!r}), zero=...)"
        )
    if "zero" not in settings or not settings.keys() <= _OPTIONS:
        raise PruneError(
            f"options are {settings}: pass options={{'zero': 'advantages * mask'}}, and no others than "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    hypothesis = Hypothesis.parse(settings["zero"])
    inner = lookup_backend(settings.get("backend", "inductor"))
    if not torch.is_grad_enabled():
        return inner(graph_module, example_inputs)
    capture = Capture(graph_module)
    verdict, admission = capture.prove(hypothesis)
    if isinstance(verdict, Refusal):
        warnings.warn(f"this graph runs live: {verdict}", NoEffectWarning, stacklevel=2)
        _explanations.append(lambda: Explanation(verdict.subject, (), (verdict,)))
        return inner(graph_module, example_inputs)
    with torch.no_grad():
        dead = inner(_without_grad_modes(graph_module), example_inputs)
    live = inner(graph_module, example_inputs)
    pruned = PrunedGraph(capture, hypothesis, verdict, admission, settings.get("on_violation", "poison"), live, dead)
    _explanations.append(pruned.explain)
    return pruned


#: One for each graph compiled so far in this process.
_explanations: list[Callable[[], Explanation]] = []


def explain() -> list[Explanation]:
    """What was proved and decided for each graph that this backend compiled in this process."""
    return [explanation() for explanation in _explanations]


@dataclass(frozen=True)
class _Input:
    """A placeholder: the user's name for it (``"batch.mask"``), and what is known of it."""

    node: torch.fx.Node
    name: str
    example: Any

    @property
    def trainable(self) -> bool:
        return isinstance(self.example, torch.Tensor) and self.example.requires_grad


class Capture:
    """A graph captured by torch.compile, read as a model and a loss."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self.graph = graph_module.graph
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.inputs = [_Input(node, _name_of(node), node.meta.get("example_value")) for node in nodes]
        self._owners = {_source(item.node) for item in self.inputs if item.trainable}
        self._root = graph_module
        results = self.graph.output_node().args[0]
        self.results: list[Any] = list(results) if isinstance(results, list | tuple) else [results]

    def prove(self, hypothesis: Hypothesis) -> tuple[Verdict, Admission]:
        """The verdict on the loss part."""
        losses = [index for index, node in enumerate(self.results) if _requires_grad(node)]
        names = {item.name for item in self.inputs}
        missing = [factor for factor in hypothesis.factors if not any(_ends_in(name, factor) for name in names)]
        if len(losses) != 1 or self.results[losses[0]].meta["example_value"].numel() != 1:
            return _refuse(hypothesis, f"{len(losses)} of its outputs have a gradient, or none that is one number")
        if missing:
            return _refuse(hypothesis, f"it does not read {', '.join(missing)}")
        boundary = self._boundary()
        if not boundary:
            return _refuse(hypothesis, "no module with trainable parameters is called in it")
        with tracing(None):
            try:
                return prove_program(self._loss_part(boundary, self.results[losses[0]]), hypothesis)
            except PruneError as error:
                return _refuse(hypothesis, str(error))

    @property
    def loss(self) -> int:
        """Index among `results` of the one that has a gradient."""
        return next(index for index, node in enumerate(self.results) if _requires_grad(node))

    def _in_model(self, node: torch.fx.Node) -> bool:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        return bool(stack) and any(_inside(owner, stack[0][0]) for owner in self._owners)

    def _is_read(self, item: _Input) -> bool:
        """Whether the loss part reads an input."""
        return any(not self._in_model(user) for user in item.node.users)

    def _boundary(self) -> list[torch.fx.Node]:
        """The floating point values of the model that the loss part reads."""
        return [
            node
            for node in self.graph.nodes
            if node.op != "placeholder" and self._in_model(node)
            if any(not self._in_model(user) for user in node.users) and isinstance(_example(node), torch.Tensor)
        ]

    def _loss_part(self, boundary: Sequence[torch.fx.Node], loss: torch.fx.Node) -> Program:
        graph, env = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
        tensors = [item for item in self.inputs if isinstance(item.example, torch.Tensor) and self._is_read(item)]
        for item in tensors:
            env[item.node] = graph.placeholder(item.node.name)
        for node in boundary:
            env[node] = graph.placeholder(node.name)
        for item in self.inputs:
            if item.node not in env and self._is_read(item):
                env[item.node] = _size_from(graph, env, item, tensors)
        for node in self.graph.nodes:
            if node.op == "output":
                graph.output(env[loss])
            elif node.op != "placeholder" and not self._in_model(node):
                env[node] = graph.node_copy(node, lambda old: env[old])
        names = [item.name for item in tensors]
        outputs = ["output" if index == 0 else f"output{index + 1}" for index in range(len(boundary))]
        wrt = [name for name, node in zip(outputs, boundary) if _requires_grad(node)]
        wrt += [item.name for item in tensors if item.trainable]
        with FakeTensorMode():
            examples = [_like(value) for value in (*(item.example for item in tensors), *map(_example, boundary))]
        runner = _LineInterpreter(torch.fx.GraphModule(self._root, graph))
        return Program(runner.run, tuple(examples), {}, (*names, *outputs), tuple(wrt), "a captured graph")


class _LineInterpreter(torch.fx.Interpreter):
    """Runs a graph node by node, each in the name of the user's line that it was captured from."""

    def run_node(self, node: torch.fx.Node) -> Any:
        with at_line(_line(node.stack_trace or "")):
            return super().run_node(node)


class PrunedGraph:
    """A captured graph compiled twice; call it as either."""

    def __init__(
        self,
        capture: Capture,
        hypothesis: Hypothesis,
        verdict: Verdict,
        admission: Admission,
        on_violation: OnViolation,
        live: Compiled,
        dead: Compiled,
    ) -> None:
        self._live, self._dead = live, dead
        self._loss = capture.loss
        self._hypothesis, self._verdict, self._admission = hypothesis, verdict, admission
        self._names = [item.name for item in capture.inputs]
        self._trainable = [index for index, item in enumerate(capture.inputs) if item.trainable]
        self._factors = {
            factor: next(index for index, name in enumerate(self._names) if _ends_in(name, factor))
            for factor in hypothesis.factors
        }
        self._guard = Guard(on_violation, self._poison)
        self._arrivals: Arrivals | None = None
        self._calls = 0
        self._decisions: deque[Decision] = deque(maxlen=_REMEMBERED)
        watch_optimizers()

    def explain(self) -> Explanation:
        return Explanation("a captured graph", tuple(self._decisions), (self._verdict,))

    def __call__(self, *inputs: Any) -> Any:
        self._guard.poll()
        if self._arrivals is not None:
            self._arrivals.close()
        outcome = self._outcome(inputs)
        self._decisions.append(Decision(self._calls, outcome))
        self._calls += 1
        if isinstance(outcome, Dead):
            return self._run_dead(inputs)
        outputs = self._live(*inputs)
        if self._arrivals is not None and not self._arrivals.complete:
            self._arrivals.listen(outputs[self._loss])
        return outputs

    def _outcome(self, inputs: Sequence[Any]) -> Live | Dead:
        factors = {name.replace(".", "_"): inputs[index] for name, index in self._factors.items()}
        hypothesis = Hypothesis(tuple(factors))
        known = examine(factors, hypothesis, allow_sync=False)
        if not known.holds:
            return Live(known.reason)
        tensors = [inputs[index] for index in self._trainable]
        if not all(tensor.is_leaf for tensor in tensors):
            return Live("a gradient flows on to what was computed before this graph")
        shapes = {name: value.shape for name, value in zip(self._names, inputs) if isinstance(value, torch.Tensor)}
        if not self._admission.admits(shapes):
            return Live("these sizes are not those that it was proved for")
        if self._arrivals is None:
            self._arrivals = Arrivals(tensors)
        if not self._arrivals.complete:
            return Live("this backward shows which parameters are reached")
        return Dead(known.reason)

    def _poison(self) -> None:
        for parameter in self._arrivals.parameters() if self._arrivals is not None else ():
            if (gradient := gradient_of(parameter)) is not None:
                gradient.fill_(float("nan"))

    def _run_dead(self, inputs: Sequence[Any]) -> Any:
        assert self._arrivals is not None
        about = f"microbatch {self._calls - 1} of a captured graph"
        delivery = Delivery(self._arrivals.parameters(), functools.partial(self._guard.note, "boundary", about))
        with torch.no_grad():
            outputs = list(self._dead(*inputs))
        delivery.stands(magnitude(outputs[self._loss] * 0.0))
        outputs[self._loss] = delivery.ending(outputs[self._loss])
        return tuple(outputs)


def _refuse(hypothesis: Hypothesis, message: str) -> tuple[Verdict, Admission]:
    return Refusal(hypothesis, (), (Reason("untraceable", message),), "a captured graph"), Admission(())


def _without_grad_modes(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy that leaves the grad mode as it is: after a ``no_grad`` block of the user it would be on again."""
    like = copy.deepcopy(graph_module)
    for node in list(like.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            like.graph.erase_node(node)
    like.recompile()
    return like


def _example(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def _requires_grad(node: Any) -> bool:
    example = _example(node) if isinstance(node, torch.fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


def _source(node: torch.fx.Node) -> str:
    argument = node.meta.get("grapharg")
    return str(argument.source.name) if argument is not None else node.name


def _name_of(node: torch.fx.Node) -> str:
    """``L['batch']['mask']`` as the user's ``batch.mask``."""
    return ".".join(re.findall(r"\w+", _source(node).removeprefix("L").removeprefix("G")))


def _ends_in(name: str, factor: str) -> bool:
    return name == factor or name.endswith(f".{factor}")


def _inside(source: str, module: str) -> bool:
    """Whether the thing at `source` belongs to the module at the path `module`."""
    return source == module or source.startswith((f"{module}.", f"{module}["))


def _size_from(graph: torch.fx.Graph, env: Mapping[Any, Any], item: _Input, tensors: Sequence[_Input]) -> torch.fx.Node:
    """A node that reads the size which this placeholder stands for from a tensor that has it."""
    for other in tensors:
        for dim, size in enumerate(other.example.shape):
            if isinstance(size, torch.SymInt) and size.node.expr == item.example.node.expr:
                return graph.call_method("size", (env[other.node], dim))
    raise PruneError(f"{item.name} is a number that is no size of an input")


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data, of the sizes that this one of symbolic sizes had when it was captured."""
    numbers = [[_hint(size) for size in group] for group in (tensor.shape, tensor.stride())]
    return torch.empty_strided(*numbers, dtype=tensor.dtype, device=tensor.device)


def _hint(size: Any) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _line(stack: str) -> Any:
    found = re.findall(r'File "(.+)", line (\d+), in (.+)', stack)
    return source_line(found[-1][0], int(found[-1][1]), found[-1][2]) if found else None
