"""One microbatch, run in one of two special ways: observed (live, and written down) or dead (without a graph).

A run has one or more segments: a plain step is one call; Megatron's is ``forward_step`` and then ``loss_func``. Hooks
and modes are on only inside a segment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint

from gradprune.boundary import Boundary, float_leaves, replace, trainable_modules
from gradprune.checks import failure
from gradprune.dead import Delivery
from gradprune.facts import Condition, Verdict
from gradprune.graphs import Arrivals, reached_leaves
from gradprune.proofs import Proof, weak
from gradprune.recorder import Recorder
from gradprune.tape import Tape
from gradprune.trace.admission import Admission
from gradprune.trees import leaves
from gradprune.watch import TapeWatch

#: Outputs so many times larger than the batch (logits) make the loss's own backward costly: it is run for a sample.
_WIDE = 16

Inside = Callable[[], AbstractContextManager[Sequence[torch.Tensor]]]


def batch_leaves(batch: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by its name there, ``"batch.advantages"``."""
    if type(batch) is dict and all(map(_FLAT.__contains__, map(type, batch.values()))):
        return {f"batch.{key}": value for key, value in batch.items() if type(value) is torch.Tensor}
    return dict(leaves(batch, "batch"))


class ObservedRun:
    """Runs live and records the calls outside the model, so that they can be compared with proofs, or proved."""

    def __init__(self, models: Mapping[str, torch.nn.Module], named: Mapping[str, torch.Tensor]) -> None:
        parameters = {
            id(parameter): name
            for prefix, model in models.items()
            for name, parameter in model.named_parameters(prefix)
        }
        self._recorder = Recorder(named, parameters)
        modules = [module for model in models.values() for module in trainable_modules(model)]
        self._boundary = Boundary(list(dict.fromkeys(modules)), around=self._recorder.paused, returned=self._output)
        self._returned: list[torch.Tensor] = []
        self.shares_graph = False
        self._named = list(named.values())
        # By value: batch norm writes its statistics without a trace in the version counter.
        self._buffers = [(buffer, buffer.clone()) for model in models.values() for _, buffer in model.named_buffers()]

    @contextmanager
    def segment(self) -> Iterator[None]:
        with self._recorder.observing(), self._boundary.hooked():
            yield

    def _output(self, name: str, output: Any) -> Any:
        with self._recorder.paused():
            for leaf, tensor in float_leaves(name, output):
                self._recorder.add_output(leaf, tensor)
                if tensor.requires_grad:
                    self._returned.append(tensor)
        return output

    def release(self) -> None:
        """Let go of the tensors of the run: it and its hooks refer to each other, and would hold them for a while."""
        self._recorder.release()
        for held in (self._returned, self._named, self._buffers):
            held.clear()

    def gave(self, output: Any, loss: torch.Tensor) -> None:
        """Take note of what the step returned: `shares_graph` if the caller may differentiate more than the loss."""
        self.shares_graph = any(tensor is not loss and tensor.requires_grad for _, tensor in leaves(output))

    def boundary(self) -> list[torch.Tensor]:
        """What the model returned and a gradient may flow into."""
        return self._returned

    def tape(self, loss: torch.Tensor) -> tuple[Tape, list[torch.Tensor]]:
        """What was recorded of `loss`, and the tensors of its leaves. Raises TraceError where it does not add up."""
        return self._recorder.finish(loss)

    def proof(self, verdict: Verdict, tape: Tape, admission: Admission, loss: torch.Tensor) -> Proof:
        """A verdict on `tape`, with what a dead run needs to know of this run."""
        entries = self._boundary.entries
        written = [buffer for buffer, before in self._buffers if not torch.equal(buffer, before)]
        reached, more = reached_leaves(loss)
        wide = sum(map(torch.Tensor.numel, self._returned)) > _WIDE * max(
            map(torch.Tensor.numel, self._named), default=0
        )
        return Proof(
            verdict,
            tape,
            admission,
            weak(entries),
            weak(reached),
            weak(written),
            self._recorder.communicates,
            wide and not self.shares_graph,  # without a graph, a gradient into the other outputs would be lost unseen
            Arrivals(_others(entries, reached)) if more else None,
        )


def _others(modules: Iterable[torch.nn.Module], known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The trainable parameters of `modules` that are not among `known`."""
    seen = {id(tensor) for tensor in known}
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    return [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in seen]


class DeadRun:
    """Runs the model's modules without a graph and watches that the rest makes the calls that were proved.

    to_boundary: keep a graph of the loss down to the model's outputs, whose cotangent is looked at in the backward;
    else there is no graph at all, and the proof's side conditions are looked at as they are computed.
    """

    def __init__(
        self,
        proof: Proof,
        named: Mapping[str, torch.Tensor],
        delivery: Delivery,
        inside: Inside,
        to_boundary: bool,
        failed: Callable[[Condition, torch.Tensor], None],
    ) -> None:
        self._watch = TapeWatch(proof.tape, None if to_boundary else self._look)
        self._to_boundary, self._failed = to_boundary, failed
        self._boundary = Boundary(
            proof.modules(),
            around=self._watch.paused,
            inside=self._without_graph,
            computed=self._bound,
            returned=self._output,
        )
        self._proof, self._delivery, self._inside = proof, delivery, inside
        self._outputs = frozenset(proof.outputs)
        self._called: set[str] = set()
        self._computed: set[str] = set()
        for name, tensor in named.items():
            self._watch.bind(name, tensor)
            self._look_at_leaf(name, tensor)

    @contextmanager
    def segment(self) -> Iterator[None]:
        with self._watch.observing(), self._boundary.hooked():
            yield

    @property
    def touched(self) -> bool:
        """Whether a module of the model was called."""
        return bool(self._called or self._computed)

    def difference(self, loss: torch.Tensor) -> str | None:
        """None if the run was the one that was proved, else where it was not."""
        if not self._computed >= self._called:
            return "a wrapper did not call the module that it wraps"
        if not self._watch.matches(loss):
            return self._watch.difference()
        if not self._proof.admission.admits(self._watch.shapes()):
            return "these sizes are not those that it was proved for"
        return None

    def _look(self, entry: int, result: torch.Tensor) -> None:
        for condition in self._proof.checks.entries.get(entry, ()):
            self._failed(condition, failure(condition, result.detach()))

    def _look_at_leaf(self, name: str, tensor: torch.Tensor) -> None:
        if not self._to_boundary:
            for condition in self._proof.checks.leaves.get(name, ()):
                self._failed(condition, failure(condition, tensor.detach()))

    @contextmanager
    def _without_graph(self) -> Iterator[None]:
        with self._inside() as others, torch.no_grad(), same_kernels():
            yield
        self._delivery.also(others)

    def _bound(self, name: str, output: Any) -> Any:
        self._computed.add(name)
        if not self._to_boundary:
            return output
        new = {
            id(tensor): self._delivery.bound(tensor)
            for leaf, tensor in float_leaves(name, output)
            if leaf in self._outputs
        }
        return replace(output, new)

    def _output(self, name: str, output: Any) -> Any:
        self._called.add(name)
        with self._watch.paused():
            for leaf, tensor in float_leaves(name, output):
                self._watch.bind(leaf, tensor)
                self._look_at_leaf(leaf, tensor)
        return output


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


class Rollback:
    """Random state before a dead run, and the buffers that it is about to write, to run the microbatch again."""

    def __init__(self, buffers: Sequence[torch.Tensor], devices: Iterable[torch.device]) -> None:
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        self._buffers = buffers
        self._values: list[torch.Tensor] | None = None

    def keep_buffers(self) -> None:
        """To be called when the model is about to compute, after a wrapper has brought its buffers up to date."""
        if self._values is None:
            self._values = [buffer.clone() for buffer in self._buffers]

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values or ()):
                buffer.copy_(value)


def family(
    models: Mapping[str, torch.nn.Module], named: Mapping[str, torch.Tensor], constants: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What sets the programs of two microbatches apart before any of it runs: kinds of tensors, modes, constants, and
    which parameters there are and are trained."""
    kinds = tuple((name, tensor.dim(), tensor.dtype, tensor.device.type) for name, tensor in named.items())
    autocast = tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    modes = tuple((name, id(model), model.training) for name, model in models.items())
    parameters = tuple((id(p), p.requires_grad) for model in models.values() for p in model.parameters())
    return modes, parameters, autocast, kinds, constants


def batch_constants(batch: Any) -> tuple[tuple[str, str, Any], ...]:
    """The Python values in a batch that is a mapping, by name and type."""
    items = batch.items() if isinstance(batch, Mapping) else ()
    found = [(str(key), type(value).__name__, value) for key, value in items if isinstance(value, _CONSTANTS)]
    return tuple(sorted(found))


_CONSTANTS = (bool, int, float, str)
_FLAT = frozenset([torch.Tensor, *_CONSTANTS, type(None)])
