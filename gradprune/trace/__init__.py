"""The tracing front end: a Python step in, joint forward-and-backward graphs out, one per data-dependent path.

Every private torch name of the project is imported in this package. Tried with torch 2.13.0.

The program runs on fake tensors: sizes are symbols, values read from tensors are symbols, and a branch on such a value
is taken both ways. Nothing is ever decided by the values of an example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradprune.calls import Numbers, error_line, is_user_file
from gradprune.errors import PruneError, TraceError
from gradprune.joint import CallStream, JointGraph
from gradprune.trace.capture import LineTracer, TraceMode, capturing, gradients, node_of
from gradprune.trace.shapes import BranchingShapeEnv, Sizes, symbolic_dims
from gradprune.trees import leaves, loss_of, map_tensors

__all__ = ["trace_joint"]


def trace_joint(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    wrt: Sequence[str],
    max_paths: int = 64,
) -> tuple[JointGraph, ...]:
    """The joint graphs of ``fn(*args, **kwargs)``, one per data-dependent path, with gradients of its loss.

    args, kwargs: an example; its tensors give dtypes, devices, layouts and ranks, never values. Everything that is
        not a tensor is used as it is.
    names: names of the positional arguments, by default those of the signature; they prefix the names of leaves.
    wrt: names of leaves, or prefixes of them, that depend on the model: ``("outputs",)``, ``("logp",)``. Their
        floating-point tensors get gradients.

    Raises TraceError, with the user's line, for a program that cannot be traced.
    """
    kwargs = dict(kwargs or {})
    named = _named_arguments(fn, args, kwargs, names)
    try:
        return _explore(fn, len(args), named, wrt, max_paths, symbolic=True)
    except TraceError:
        return _explore(fn, len(args), named, wrt, max_paths, symbolic=False)


def _named_arguments(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] | None
) -> list[tuple[str, Any]]:
    if names is None:
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in plain]
        names += [f"args[{index}]" for index in range(len(names), len(args))]
    if len(names) < len(args):
        raise PruneError(f"{len(names)} names for {len(args)} arguments: name each positional argument")
    return [*zip(names, args), *kwargs.items()]


def _explore(
    fn: Callable[..., Any],
    positional: int,
    named: list[tuple[str, Any]],
    wrt: Sequence[str],
    max_paths: int,
    *,
    symbolic: bool,
) -> tuple[JointGraph, ...]:
    """Traces every path, depth first: each new decision of a path is also taken the other way."""
    pending: list[tuple[bool, ...]] = [()]
    done: list[JointGraph] = []
    tried = 0
    while pending:
        script = pending.pop()
        tried += 1
        if tried > max_paths:
            raise TraceError(f"more than {max_paths} data-dependent paths")
        shape_env = BranchingShapeEnv(script)
        path = _trace_path(fn, positional, named, wrt, shape_env, symbolic=symbolic)
        if path is not None:
            done.append(path)
        answers = [decision.answer for decision in shape_env.decisions]
        pending += [(*answers[:index], not answers[index]) for index in range(len(script), len(answers))]
    if not done:
        raise TraceError("every path of the program raises")
    return tuple(done)


def _trace_path(
    fn: Callable[..., Any],
    positional: int,
    named: list[tuple[str, Any]],
    wrt: Sequence[str],
    shape_env: BranchingShapeEnv,
    *,
    symbolic: bool,
) -> JointGraph | None:
    """One path as a graph; None where the program itself raises on it."""
    tracer = LineTracer()
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    mode = TraceMode(tracer, Sizes(fake_mode, shape_env, symbolic=symbolic))
    found: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(), torch.compiler.set_stance("force_eager"), capturing(tracer, fake_mode):
        values = [_with_fakes(value, name, wrt, mode, found) for name, value in named]
        if not any(tensor.requires_grad for tensor in found.values()):
            raise PruneError(f"wrt={list(wrt)} names no floating-point tensor among {', '.join(found)}")
        mode.numbers = Numbers(found)
        inner = {name: tensor.clone() if tensor.requires_grad else tensor for name, tensor in found.items()}
        swap = {id(found[name]): inner[name] for name in found}
        values = [map_tensors(value, lambda tensor: swap.get(id(tensor), tensor)) for value in values]
        mode.numbers = Numbers(inner)
        keywords = {name: value for (name, _), value in list(zip(named, values))[positional:]}
        try:
            with mode:
                loss = loss_of(fn(*values[:positional], **keywords))
        except Exception as error:
            if shape_env.decisions and _raised_by_user(error):
                return None
            raise _as_trace_error(error) from error
        return _finish(mode, loss, found, shape_env)


def _raised_by_user(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and is_user_file(trace.tb_frame.f_code.co_filename)


def _as_trace_error(error: Exception) -> TraceError:
    if isinstance(error, TraceError):
        return error
    return TraceError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", error_line(error))


def _with_fakes(value: Any, name: str, wrt: Sequence[str], mode: TraceMode, found: dict[str, torch.Tensor]) -> Any:
    path = iter([leaf for leaf, _ in leaves(value, name)])

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        leaf = next(path)
        role = "wrt" if _is_wrt(leaf, wrt) and tensor.is_floating_point() else "input"
        found[leaf] = mode.leaf(tensor, leaf, role)
        return found[leaf]

    return map_tensors(value, fake)


def _is_wrt(name: str, wrt: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")) for prefix in wrt)


def _finish(
    mode: TraceMode, loss: torch.Tensor, found: dict[str, torch.Tensor], shape_env: BranchingShapeEnv
) -> JointGraph:
    tracer = mode.tracer
    names = [item.name for item in mode.inputs if item.role == "wrt"]
    grads: list[torch.Tensor | None] = [None] * len(names)
    if loss.requires_grad:
        tangent = mode.leaf(loss, "loss", "tangent", static=True)
        grads = gradients(mode, loss, [found[name] for name in names], tangent)
    nodes = [None if grad is None else node_of(tracer, grad) for grad in grads]
    loss_node = node_of(tracer, loss)
    output: Any = tracer.create_node("output", "output", ((loss_node, *nodes),), {})
    _drop_identities(tracer.graph)
    _drop_unread(tracer.graph)
    module = torch.fx.GraphModule(tracer.root, tracer.graph)
    symbolic = tuple(dim for name, tensor in found.items() for dim in symbolic_dims(name, tensor))
    return JointGraph(
        graph_module=module,
        inputs=tuple(mode.inputs),
        gradients=dict(zip(names, output.args[0][1:])),
        stream=CallStream(tuple(mode.calls)),
        shape_env=shape_env,
        branches=tuple((str(decision), decision.where) for decision in shape_env.decisions),
        symbolic=symbolic,
    )


_IDENTITIES = frozenset((torch.ops.aten.alias.default, torch.ops.aten.clone.default, torch.ops.aten.detach.default))


def _drop_identities(graph: torch.fx.Graph) -> None:
    """Lets the readers of a copy read the original: in a graph without mutation they are the same value."""
    for node in graph.nodes:
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])


def _drop_unread(graph: torch.fx.Graph) -> None:
    """Erases every operator that no output reads: metrics, and asserts about them."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
