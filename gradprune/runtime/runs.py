"""One microbatch, run in one of two special ways: observed (live, and written down) or dead (without activations).

A run has one or more segments: a plain step is one call; Megatron's is ``forward_step`` and then ``loss_func``. Hooks
and modes are on only inside a segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.nn.parameter import is_lazy

from gradprune.facts import Verdict
from gradprune.patching import replaced
from gradprune.runtime.boundary import Boundary, Call, float_leaves, replace, trainable_modules
from gradprune.runtime.checks import Looker
from gradprune.runtime.dead import shield
from gradprune.runtime.graphs import Arrivals, Reach, reach_of
from gradprune.runtime.lean import Lean
from gradprune.runtime.model_state import fingerprint, keeps_state
from gradprune.runtime.notices import InnerGradients, TensorHooks, sparse_gradient, unseen_functions
from gradprune.runtime.proofs import Proof, weak
from gradprune.runtime.python_state import scalars_of
from gradprune.runtime.recorder import Recorder
from gradprune.runtime.tape import Tape
from gradprune.runtime.watch import TapeWatch
from gradprune.schedule import Forward, Schedule
from gradprune.trace.admission import Admission

#: Outputs so many times larger than the batch (logits) make the loss's own backward costly: it is run for a sample.
_WIDE = 16


class ObservedRun:
    """Runs live and records the calls outside the model, so that they can be compared with proofs, or proved."""

    def __init__(
        self, models: Mapping[str, torch.nn.Module], named: Mapping[str, torch.Tensor], schedule: Schedule
    ) -> None:
        self._schedule = schedule
        parameters = {
            id(parameter): name
            for prefix, model in models.items()
            for name, parameter in model.named_parameters(prefix)
        }
        self._recorder = Recorder(named, parameters)
        modules = [module for model in models.values() for module in trainable_modules(model)]
        self._boundary = Boundary(
            list(dict.fromkeys(modules)), around=self._recorder.paused, compute=self._compute, returned=self._output
        )
        self._size_of_outputs = 0
        self._saved_elsewhere = self._stateful = False
        self._hooks = TensorHooks(schedule)
        self._linked: set[str] = set()
        self._named = list(named.values())
        # By value: batch norm writes its statistics without a trace in the version counter.
        buffers = [buffer for model in models.values() for _, buffer in model.named_buffers()]
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers if not is_lazy(buffer)]

    @contextmanager
    def segment(self) -> Iterator[None]:
        with self._noticing_checkpoints(), self._hooks.noticed(), self._recorder.observing(), self._boundary.hooked():
            yield

    @contextmanager
    def _noticing_checkpoints(self) -> Iterator[None]:
        enter: Any = saved_tensors_hooks.__enter__

        def entered(hooks: saved_tensors_hooks) -> Any:
            self._saved_elsewhere = True
            return enter(hooks)

        with replaced(saved_tensors_hooks, "__enter__", entered):
            yield

    def _compute(self, name: str, call: Call) -> Any:
        before = fingerprint(call)
        inner = InnerGradients()
        with inner.noticed():
            output = call()
        self._stateful |= inner.met
        # What a forward threw away would be missing where a part of it is computed again.
        self._stateful |= keeps_state(call) or self._hooks.recomputing or fingerprint(call) != before
        return output

    def objection(self, reach: Reach) -> str | None:
        """Why this run must not be cut off from its graph, whatever is proved."""
        return (
            self._hooks.objection()
            or unseen_functions(reach, self._recorder.applied_functions)
            or sparse_gradient(self._boundary.entries)
        )

    def cut_off(self) -> None:
        """No backward will come."""
        self._hooks.forget()

    def recomputes(self) -> bool:
        """Whether the backward may run parts of the forward again, of a model that has buffers."""
        return self._saved_elsewhere and bool(self._buffers)

    def _output(self, name: str, module: torch.nn.Module, output: Any) -> Any:
        with self._recorder.paused():
            output = shielded(output) if self._schedule.shields(module) else output
            for leaf, tensor in float_leaves(name, output):
                self._recorder.add_output(leaf, tensor)
                if tensor.requires_grad:
                    self._size_of_outputs += tensor.numel()
                    self._linked.add(leaf)
        return output

    def release(self) -> None:
        """Let go of the tensors of the run: it and its hooks refer to each other, and would hold them for a while."""
        self._recorder.release()
        self._boundary.release()
        for held in (self._named, self._buffers):
            held.clear()

    def functions_read(self) -> tuple[Any, ...]:
        """The numbers and words that the user's Functions in this run can read, which no call shows."""
        found = [scalars_of(function) for function in self._recorder.applied_functions]
        return tuple(sorted(found, key=repr))

    @property
    def entrances(self) -> dict[int, GradientEdge]:
        """Where the graph of the loss enters that of the model, by the number of the leaf of the tape."""
        return self._recorder.entrances

    def reach(self, loss: torch.Tensor, silent: Container[int] = ()) -> Reach:
        return reach_of(loss, self._recorder.entrances, silent)

    def tape(self, loss: torch.Tensor) -> tuple[Tape, list[torch.Tensor]]:
        """What was recorded of `loss`, and the tensors of its leaves. Raises TraceError where it does not add up."""
        return self._recorder.finish(loss)

    def proof(self, verdict: Verdict, tape: Tape, admission: Admission, loss: torch.Tensor) -> Proof:
        """A verdict on `tape`, with what a dead run needs to know of this run."""
        entries = self._boundary.entries
        written = [buffer for buffer, before in self._buffers if not torch.equal(buffer, before)]
        reach = self.reach(loss)
        wide = self._size_of_outputs > _WIDE * max(map(torch.Tensor.numel, self._named), default=0)
        return Proof(
            verdict,
            tape,
            admission,
            weak(entries),
            weak(self._schedule.owners(reach.leaves)),
            weak(written),
            self._recorder.communicates,
            wide,
            Arrivals(_others(entries, reach.leaves)) if reach.hidden else None,
            self._stateful,
            frozenset(self._linked),
        )


def _others(modules: Iterable[torch.nn.Module], known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The trainable parameters of `modules` that are not among `known`."""
    seen = {id(tensor) for tensor in known}
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    return [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in seen]


class DeadRun:
    """Runs the model's modules without saving activations and watches that the rest makes the calls that were proved.

    look: looks at the proof's side conditions as they are computed; without it the cotangent at the `entrances` of the
    model shows whether they held. model: the one that the step was called with.
    """

    def __init__(
        self,
        proof: Proof,
        microbatch_tensors: Mapping[str, torch.Tensor],
        model_buffers: Callable[[], Iterable[torch.Tensor]],
        model: torch.nn.Module,
        schedule: Schedule,
        look: Looker | None,
    ) -> None:
        self._proof = proof
        self._watch = TapeWatch(proof.tape, look)
        devices = {tensor.device for tensor in microbatch_tensors.values()}
        self._lean = Lean(proof.written_buffers(), model_buffers, devices, proof.stateful, proof.linked)
        self._schedule = schedule
        self._forwards: list[Forward] = []
        self._hooks = TensorHooks(schedule)
        self._model = model
        self._boundary = Boundary(
            proof.modules(), around=self._watch.paused, compute=self._compute, returned=self._output
        )
        self._called: set[str] = set()
        self._computed: set[str] = set()
        for name, tensor in microbatch_tensors.items():
            self._watch.bind(name, tensor)

    @contextmanager
    def segment(self) -> Iterator[None]:
        with self._hooks.noticed(), self._watch.observing(), self._boundary.hooked():
            yield

    @property
    def entrances(self) -> dict[int, GradientEdge]:
        """Where the graph of the loss enters that of the model, by the number of the leaf of the tape."""
        return self._watch.entrances

    def reach(self, loss: torch.Tensor) -> Reach:
        reach = reach_of(loss, self._watch.entrances, self._proof.silent)
        own = set(map(id, self._lean.leaves))
        return dataclasses.replace(reach, leaves=tuple(leaf for leaf in reach.leaves if id(leaf) not in own))

    def objection(self, reach: Reach) -> str | None:
        """Why this run must not be cut off from its graph, though its calls are those that were proved."""
        return self._hooks.objection() or unseen_functions(reach, self._watch.applied_functions)

    @property
    def hides(self) -> bool:
        """Whether the graph of the model does not show what it reaches."""
        return self._lean.hides

    def difference(self, loss: torch.Tensor) -> str | None:
        """None if the run was the one that was proved, else where it was not."""
        if not self._computed >= self._called:
            return "a wrapper did not call the module that it wraps"
        if not self._watch.matches(loss):
            return self._watch.difference()
        if not self._proof.admission.admits(self._watch.shapes()):
            return "these sizes are not those that it was proved for"
        return None

    def release(self) -> None:
        """Let go of the run: it and its hooks refer to each other."""
        self._boundary.release()

    def cut_off(self) -> None:
        """No backward will come."""
        self._hooks.forget()
        for scheduled in self._forwards:
            scheduled.dead()

    def went_live(self) -> None:
        """A backward will come."""
        for scheduled in self._forwards:
            scheduled.live()

    def _compute(self, name: str, call: Call) -> Any:
        self._computed.add(name)
        scheduled = self._schedule.forward(self._model)
        self._forwards.append(scheduled)
        with scheduled.first:
            return self._lean.run(name, call, scheduled.again)

    def _output(self, name: str, module: torch.nn.Module, output: Any) -> Any:
        self._called.add(name)
        with self._watch.paused():
            output = shielded(output) if self._schedule.shields(module) else output
            for leaf, tensor in float_leaves(name, output):
                self._watch.bind(leaf, tensor)
        return output


def shielded(output: Any) -> Any:
    """`output`, of whose tensors a gradient may be asked without a hook of the wrapper's noticing."""
    new = {id(tensor): shield(tensor) for _, tensor in float_leaves("", output) if tensor.grad_fn is not None}
    return replace(output, new)


@contextmanager
def same_kernels() -> Iterator[None]:
    """Keep torch from taking its inference-only path for attention in eval mode, whose last bits differ, and from
    warning that a checkpoint has nothing to recompute."""
    fast, check = torch.backends.mha.get_fastpath_enabled(), torch.utils.checkpoint.check_backward_validity
    torch.backends.mha.set_fastpath_enabled(False)
    torch.utils.checkpoint.check_backward_validity = lambda inputs: None
    try:
        yield
    finally:
        torch.utils.checkpoint.check_backward_validity = check
        torch.backends.mha.set_fastpath_enabled(fast)
