"""Steps that torch.compile made: nobody sees the torch calls inside, so that they cannot be watched while they run.

The step as it was written is run once, eagerly and beside the compiled one, to prove it; state that it changes is put
back. A dead microbatch then runs the compiled step under ``torch.no_grad()``: torch.compile guards on the grad mode,
and keeps two graphs, live and dead. Of Python state that changes later only what `python_state` watches is noticed.

Relied upon: ``torch.compile`` keeps the callable that it was given as ``_torchdynamo_orig_callable`` (torch 2.11-2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradprune.facts import Dead, Live, Refusal
from gradprune.runtime.attempts import TRIAL, replaced
from gradprune.runtime.graphs import Arrivals
from gradprune.runtime.guard import magnitude
from gradprune.runtime.microbatch import Microbatch
from gradprune.runtime.proofs import Proof
from gradprune.runtime.pruner import Pruner
from gradprune.runtime.python_state import capture
from gradprune.runtime.random_state import RandomState
from gradprune.runtime.runs import ObservedRun, same_kernels
from gradprune.trace.modules import is_compiled_in_place
from gradprune.trees import loss_of

Call = Callable[[], Any]


def is_compiled(value: Any) -> bool:
    """Whether torch.compile made `value`, which is no model: a function, or a module without trained parameters."""
    marks = getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        made = "_orig_mod" in value._modules or is_compiled_in_place(value)
        return made and not any(parameter.requires_grad for parameter in value.parameters())
    return "_torchdynamo_orig_callable" in marks and "_torchdynamo_disable" not in marks  # disable() leaves marks too


def uses_compiled(function: Callable[..., Any]) -> bool:
    """Whether `function` is compiled, or names something compiled in its closure, its globals or its owner's
    attributes, private ones too."""
    owner = getattr(function, "__self__", function)
    named = [*capture(function).values(), *getattr(owner, "__dict__", {}).values()]
    return is_compiled(function) or any(map(is_compiled, named))


class CompiledRun:
    """One microbatch of a compiled step, which must be run by `run`."""

    def __init__(self, pruner: Pruner, microbatch: Microbatch) -> None:
        self._pruner, self._microbatch = pruner, microbatch

    def run(self, call: Call) -> Any:
        """What the step, which `call` calls, is to return for this microbatch."""
        pruner, microbatch = self._pruner, self._microbatch
        way = pruner.way(microbatch)
        if way is None and self._replicated():
            way = Live("DistributedDataParallel inside a compiled step: compile the model, or the loss, instead")
        if way is None or (isinstance(way, Proof) and not self._admits(way)):
            way = self._probe(call)
        if isinstance(way, Proof) and (reason := _objection(way)) is not None:
            way = Live(reason)
        if isinstance(way, Live):
            return self._live(call, way)
        if not pruner.trust.sure(way) and not pruner.audited():
            return self._try_out(call, way)
        return self._audit(call, way) if pruner.audited() else self._dead(call, way)

    def _live(self, call: Call, why: Live) -> Any:
        output = call()  # not under the FLOP meter, whose mode would have torch run the step uncompiled
        self._pruner.note(self._microbatch, why)
        return output

    def _dead(self, call: Call, proof: Proof) -> Any:
        delivery = self._pruner.delivery(self._microbatch, proof.parameters())
        with torch.no_grad(), same_kernels():
            output = call()
        loss = loss_of(output)
        delivery.stands(magnitude(loss.detach() * 0.0))
        self._pruner.note(self._microbatch, Dead(self._microbatch.known.reason))
        return replaced(output, loss, delivery.ending(loss))

    def _audit(self, call: Call, proof: Proof) -> Any:
        output = call()
        self._pruner.hear(self._microbatch, Arrivals(proof.parameters()), loss_of(output))
        return output

    def _try_out(self, call: Call, proof: Proof) -> Any:
        output = call()
        reach = self._pruner.trust.unsure[proof]
        self._pruner.try_out(self._microbatch, proof, reach, loss_of(output))
        self._pruner.note(self._microbatch, Live(TRIAL))
        return output

    def _probe(self, call: Call) -> Live | Proof:
        """Run the step eagerly, look at what it computes, and leave no trace of it."""
        pruner, microbatch = self._pruner, self._microbatch
        observed = ObservedRun(microbatch.models, microbatch.named, pruner.schedule)
        buffers = [(buffer, buffer.clone()) for buffer in microbatch.buffers()]
        random = RandomState({tensor.device for tensor in microbatch.named.values()})
        try:
            with torch.compiler.set_stance("force_eager"), observed.segment():
                loss = loss_of(call())
            proof = pruner.prove(microbatch, observed, loss)
            if isinstance(proof, Proof) and proof.verdict:
                pruner.trust.asks(proof, observed.reach(loss), observed.recomputes())
        finally:
            random.restore()
            for buffer, value in buffers:
                buffer.data.copy_(value)
        verdict = proof if isinstance(proof, Refusal) else proof.verdict
        if isinstance(verdict, Refusal):
            pruner.refused(verdict)
            return Live(f"not proved: {verdict.reasons[0]}")
        assert isinstance(proof, Proof)
        return proof

    def _admits(self, proof: Proof) -> bool:
        shapes: Mapping[str, Any] = {name: tensor.shape for name, tensor in self._microbatch.named.items()}
        return proof.admission.admits(shapes)

    def _replicated(self) -> bool:
        modules = (module for model in self._microbatch.models.values() for module in model.modules())
        return any(isinstance(module, DistributedDataParallel) for module in modules)


def _objection(proof: Proof) -> str | None:
    if proof.communicates:
        return "a compiled step that issues collectives itself"
    if proof.hidden is not None:
        return "reentrant checkpointing inside a compiled step: use use_reentrant=False"
    return None
