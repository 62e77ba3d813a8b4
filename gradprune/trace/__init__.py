"""The tracing front end: a Python step in, joint forward-and-backward graphs out, one per data-dependent path.

Every private torch name of the project is imported in this package. Tried with torch 2.13.0.

The program runs on fake tensors: sizes are symbols, values read from tensors are symbols, and a branch on such a value
is taken both ways. Nothing is ever decided by the values of an example.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # here, because inside a trace the import itself would be traced
from torch._subclasses.fake_tensor import FakeTensorMode

from gradprune.errors import PruneError, TraceError
from gradprune.facts import SourceLine
from gradprune.frames import is_user_file, source_line
from gradprune.joint import JointGraph
from gradprune.trace.capture import TraceMode
from gradprune.trace.graphs import drop_unread, read_originals
from gradprune.trace.shapes import BranchingShapeEnv, Sizes, symbolic_dims
from gradprune.trace.standins import standing_in, symbolic_builtins
from gradprune.trace.state import State
from gradprune.trace.tracer import LineTracer, capturing
from gradprune.trace.unknown import NeedsSymbolicBuiltins, Stopped, Unknown, is_program_file
from gradprune.trees import leaves, loss_of, map_tensors

__all__ = ["trace_joint"]


def trace_joint(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    wrt: Sequence[str],
    aligned: Sequence[str] = (),
    max_paths: int = 64,
) -> tuple[JointGraph, ...]:
    """The joint graphs of ``fn(*args, **kwargs)``, one per data-dependent path, with gradients of its loss.

    args, kwargs: an example; its tensors give dtypes, devices, layouts and ranks, never values. Everything that is
        not a tensor is used as it is; the parameters and buffers of a module stand for themselves, without data.
    names: names of the positional arguments, by default those of the signature; they prefix the names of leaves.
    wrt: names of leaves, or prefixes of them, that depend on the model: ``("outputs",)``, ``("logp",)``. Their
        floating-point tensors get gradients. A module's name, or ``"parameters"`` for all modules, means those of its
        parameters that require grad, named ``model.layers.0.weight``.
    aligned: names of leaves whose sizes are the same as far as they all have a dimension (1 stands for any size), as
        those of the factors of a hypothesis are.

    A path on which the program itself raises is left out: the step would not train there. Of each graph, ``notes`` has
    ``loss``, the node of the loss; ``raises``, the paths left out; ``assumed``, what torch took for granted about sizes
    that only data determines, and what a run would have to be compared with.

    Raises TraceError, with the user's line, for a program that cannot be traced.
    """
    program = Program(fn, _named_arguments(fn, args, dict(kwargs or {}), names), len(args), tuple(wrt), tuple(aligned))
    if program.parameters() > MOST_PARAMETERS:
        return _explore(program, max_paths, symbolic=False)
    try:
        return _explore(program, max_paths, symbolic=True)
    except TraceError as error:
        if error.kind == "branch":
            raise
        return _explore(program, max_paths, symbolic=False)


#: A module with more parameter tensors, as any real decoder, is traced with constant sizes: symbols take eight times as
#: long.
MOST_PARAMETERS = 16


@dataclass(frozen=True)
class Program:
    """What is traced: a function, its arguments by name, how many of them are positional, and what gets gradients.

    aligned: leaves whose leading sizes are the same.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...]
    positional: int
    wrt: tuple[str, ...]
    aligned: tuple[str, ...] = ()

    def call(self, values: Sequence[Any]) -> Any:
        keywords = [name for name, _ in self.arguments[self.positional :]]
        return self.function(*values[: self.positional], **dict(zip(keywords, values[self.positional :])))

    def parameters(self) -> int:
        modules = [value for _, value in self.arguments if isinstance(value, torch.nn.Module)]
        return sum(len(list(module.parameters())) for module in modules)

    def differentiates(self, leaf: str) -> bool:
        return any(leaf == prefix or leaf.startswith((f"{prefix}.", f"{prefix}[")) for prefix in self.wrt)


def _named_arguments(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] | None
) -> tuple[tuple[str, Any], ...]:
    if names is None:
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # a callable without a signature
            parameters = []
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in plain]
        names += [f"args[{index}]" for index in range(len(names), len(args))]
    if len(names) < len(args):
        raise PruneError(f"{len(names)} names for {len(args)} arguments: name each positional argument")
    return (*zip(names, args), *kwargs.items())


def _explore(program: Program, max_paths: int, *, symbolic: bool) -> tuple[JointGraph, ...]:
    """Traces every path, depth first: each new decision of a path is also taken the other way."""
    modules: list[dict[str, Any]] = []
    while True:
        try:
            with symbolic_builtins(modules):
                return _explore_paths(program, max_paths, symbolic=symbolic)
        except NeedsSymbolicBuiltins as found:
            if any(found.module is module for module in modules):
                raise found.error from found
            modules.append(found.module)


def _explore_paths(program: Program, max_paths: int, *, symbolic: bool) -> tuple[JointGraph, ...]:
    pending: list[tuple[bool, ...]] = [()]
    done: list[JointGraph] = []
    raises: list[tuple[Any, ...]] = []
    tried = 0
    state = State((program.function, *(value for _, value in program.arguments)))
    while pending:
        script = pending.pop()
        tried += 1
        shape_env = BranchingShapeEnv(script)
        try:
            path = _trace_path(program, shape_env, symbolic=symbolic)
        finally:
            state.restore()
        decisions = shape_env.decisions
        if tried == max_paths and (pending or len(decisions) > len(script)):
            message = f"the program takes more than {max_paths} paths that depend on data: take fewer decisions on data"
            raise TraceError(message, decisions[-1].where, kind="branch")
        if path is None:
            raises.append(tuple((str(decision), decision.where) for decision in decisions))
        else:
            done.append(path)
        answers = tuple(decision.answer for decision in decisions)
        pending += [(*answers[:index], not answers[index]) for index in range(len(script), len(answers))]
    if not done:
        raise TraceError("the program raises, whatever its data")
    for path in done:
        path.notes["raises"] = tuple(raises)
    return tuple(done)


def _trace_path(program: Program, shape_env: BranchingShapeEnv, *, symbolic: bool) -> JointGraph | None:
    """One path as a graph; None where the program itself raises on it."""
    tracer = LineTracer()
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    sizes = Sizes(fake_mode, shape_env, _device_of(program), symbolic=symbolic)
    mode = TraceMode(tracer, sizes, shape_env)
    with standing_in(mode), capturing(tracer, fake_mode):
        inputs = _Inputs(program, mode)
        try:
            with mode:
                loss = _loss_of(program.call(inputs.values))
            mode.finish_forward()
            return _finish(program, tracer, mode, loss, inputs, shape_env)
        except Stopped as stopped:
            raise stopped.error from stopped
        except PruneError:
            raise
        except Exception as error:
            if shape_env.decisions and _is_raised_by_user(error):
                return None
            raise _as_trace_error(error) from error


def _loss_of(output: Any) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple) and output else output
    for value in (first, output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)):
        if isinstance(value, Unknown):
            value.refuse()
    return loss_of(output)


class _Inputs:
    """The fake arguments of one path.

    found: leaves by name, as the graph has them; values: the arguments, in which a leaf that gets a gradient is a copy,
    so that the program may write to it as it may to a model's output.
    """

    def __init__(self, program: Program, mode: TraceMode) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.values: list[Any] = []
        used: dict[str, torch.Tensor] = {}
        for name, value in program.arguments:
            self.values.append(self._fakes(program, name, value, mode, used))
        wrt = [name for name, tensor in self.found.items() if tensor.requires_grad]
        if not wrt:
            known = ", ".join(self.found) or "no tensor"
            raise PruneError(f"wrt={list(program.wrt)} names no tensor that can have a gradient: there are {known}")
        mode.bind(used)
        mode.align([self.found[name].shape for name in program.aligned if name in self.found])

    def _fakes(self, program: Program, name: str, value: Any, mode: TraceMode, used: dict[str, torch.Tensor]) -> Any:
        if isinstance(value, torch.nn.Module):
            self._adopt_module(program, name, value, mode)
            return value
        names = iter([leaf for leaf, _ in leaves(value, name)])

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            leaf = next(names)
            wanted = program.differentiates(leaf) and tensor.is_floating_point()
            self.found[leaf] = mode.leaf(tensor, leaf, "wrt" if wanted else "input")
            used[leaf] = self.found[leaf].clone() if wanted else self.found[leaf]
            return used[leaf]

        return map_tensors(value, fake)

    def _adopt_module(self, program: Program, name: str, module: torch.nn.Module, mode: TraceMode) -> None:
        for key, parameter in module.named_parameters():
            leaf = f"{name}.{key}"
            wanted = "parameters" in program.wrt or program.differentiates(leaf)
            if wanted and parameter.requires_grad:
                self.found[leaf] = mode.leaf(parameter, leaf, "wrt", static=True)
                mode.adopt(parameter, self.found[leaf])
            else:
                mode.name_outside(parameter, leaf)
        for key, buffer in module.named_buffers():
            mode.name_outside(buffer, f"{name}.{key}")


def _device_of(program: Program) -> torch.device:
    """Where the program's tensors live; what is on the meta device stands for a tensor there."""
    tensors = [tensor for name, value in program.arguments for _, tensor in leaves(value, name)]
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


def _finish(
    program: Program,
    tracer: LineTracer,
    mode: TraceMode,
    loss: torch.Tensor,
    inputs: _Inputs,
    shape_env: BranchingShapeEnv,
) -> JointGraph:
    names = [name for name, tensor in inputs.found.items() if tensor.requires_grad]
    grads: list[torch.Tensor | None] = [None] * len(names)
    if loss.requires_grad:
        tangent = mode.leaf(loss, "loss", "tangent", static=True)
        grads = mode.gradients(loss, [inputs.found[name] for name in names], tangent)
    tracer.call = tracer.where = None
    outputs = tuple(None if tensor is None else tracer.node_of(tensor) for tensor in (loss, *grads))
    output: Any = tracer.create_node("output", "output", (outputs,), {})
    read_originals(tracer.graph)
    drop_unread(tracer.graph, {item.node for item in mode.inputs})
    mode.lift_arrays()
    drop_unread(tracer.graph, {item.node for item in mode.inputs})
    return JointGraph(
        graph_module=torch.fx.GraphModule(tracer.root, tracer.graph),
        inputs=tuple(mode.inputs),
        gradients=dict(zip(names, output.args[0][1:])),
        stream=mode.stream([name for name, _ in inputs.found.items()]),
        shape_env=shape_env,
        branches=tuple((str(decision), decision.where) for decision in shape_env.decisions),
        symbolic=tuple(
            dim for name, tensor in inputs.found.items() for dim in symbolic_dims(name, tensor, shape_env.guarded())
        ),
        notes={"loss": output.args[0][0], "assumed": tuple(map(str, shape_env.assumptions()))},
    )


def _is_raised_by_user(error: Exception) -> bool:
    """Whether a ``raise`` or ``assert`` in user code made this error, not a call that failed on fake tensors."""
    trace = _innermost(error)
    if trace is None or not is_user_file(trace.tb_frame.f_code.co_filename):
        return False
    instructions = dis.get_instructions(trace.tb_frame.f_code)
    return any(item.offset == trace.tb_lasti and item.opname == "RAISE_VARARGS" for item in instructions)


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _as_trace_error(error: Exception) -> TraceError:
    lines = str(error).strip().splitlines()
    return TraceError(f"{type(error).__name__}: {lines[0] if lines else ''}", _user_line_of(error))


def _user_line_of(error: BaseException) -> SourceLine | None:
    """The innermost line of user code that `error` passed through."""
    found, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_program_file(code.co_filename):
            found = source_line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found
