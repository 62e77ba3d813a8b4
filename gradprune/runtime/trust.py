"""What only a real backward shows of a model: that it adds no gradient of its own, and that it writes no buffer.

A proof of the loss sees neither an autograd.Function inside the model that injects gradient, such as a router's
auxiliary loss, nor that recomputation under a checkpoint updates the statistics of a batch norm a second time. Where a
model holds a Function that is not known, or recomputes and has buffers, its first dead microbatch runs in full: the
*trial*.

What a trial found arrives from the device some time later, on one rank before another. Where ranks decide together, a
trial that was passed counts only once they have confirmed that it was on all of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from gradprune.runtime.dead import largest
from gradprune.runtime.graphs import Arrivals, Reach
from gradprune.runtime.guard import Arriving, magnitude
from gradprune.runtime.proofs import Proof


class Trust:
    """The trials of one step and their outcomes. unsure: proofs that wait for one, and what their runs reached.

    together: whether other ranks must confirm what was passed.
    """

    def __init__(self, together: Callable[[], bool]) -> None:
        self._together = together
        self._passed: list[Trial] = []
        self._functions: set[type] = set()
        self._proofs: weakref.WeakSet[Proof] = weakref.WeakSet()
        self.unsure: weakref.WeakKeyDictionary[Proof, Reach] = weakref.WeakKeyDictionary()
        self._running: list[Trial] = []
        self._objections: dict[Hashable, str] = {}

    def asks(self, proof: Proof, reach: Reach, recomputes: bool) -> bool:
        """Whether a microbatch that was proved and reaches `reach` must be tried first. recomputes: it has buffers, and
        its backward will run parts of its forward again."""
        asks = bool(reach.functions - self._functions) or ((recomputes or reach.hidden) and proof not in self._proofs)
        if asks:
            self.unsure[proof] = reach
        return asks

    @property
    def tries(self) -> bool:
        """Whether a trial is under way."""
        return bool(self._running)

    def sure(self, proof: Proof) -> bool:
        """Whether no trial of this proof is outstanding."""
        return proof not in self.unsure

    def try_out(
        self, family: Hashable, proof: Proof, reach: Reach, loss: torch.Tensor, buffers: Iterable[torch.Tensor]
    ) -> Trial:
        """Watch the coming backward of `loss`, of a microbatch that runs live."""
        trial = Trial(family, proof, reach, list(buffers))
        trial.arrivals.listen(loss, trial.heard)
        loss.register_hook(trial.begins)
        self._running.append(trial)
        return trial

    def objection(self, family: Hashable) -> str | None:
        """Why a microbatch of this family may not be pruned, as far as trials have told."""
        if family in self._objections:
            return self._objections[family]
        if any(trial.family == family for trial in self._running):
            return "what the trial of its proof found has not arrived from the device"
        if any(trial.family == family for trial in self._passed):
            return "the trial of its proof was passed, and other ranks have not confirmed that yet: step.agree(plan)"
        return None

    def settled(self) -> bool:
        """Whether no trial is outstanding or failed."""
        passed = {id(trial.proof) for trial in self._passed}
        return not self._objections and all(id(proof) in passed for proof in self.unsure)

    def confirm(self) -> None:
        """What was passed here was passed, or not asked for, on every rank that decides with this one."""
        for trial in self._passed:
            self._accept(trial)
        self._passed.clear()

    def settle(self, wait: bool = False) -> str | None:
        """Judge the trials whose backward is over: an objection that is new, or None. Waits for no device unless told
        to."""
        found = None
        for trial in list(self._running):
            numbers = trial.numbers(wait)
            if numbers is None:
                continue
            self._running.remove(trial)
            found = self._judge(trial, *numbers) or found
        return found

    def _judge(self, trial: Trial, gradient: float, written: float) -> str | None:
        if math.isnan(gradient) or math.isinf(gradient):
            return None  # a side condition failed, or no backward came: try again
        objection = None
        if gradient != 0:
            names = ", ".join(sorted(f"{kind.__module__}.{_name(kind)}" for kind in trial.reach.functions))
            objection = f"a gradient of {gradient:g} is made inside the model although the loss sends none" + (
                f", by one of: {names}" if names else ""
            )
        elif not trial.complete:
            objection = "an autograd.Function gives some of what its graph reaches no gradient"
        elif written:
            objection = "its backward writes to buffers of the model, as recomputation under a checkpoint does"
        if objection is not None:
            self._objections[trial.family] = objection
            return objection
        if self._together():
            self._passed.append(trial)
        else:
            self._accept(trial)
        return None

    def _accept(self, trial: Trial) -> None:
        self._functions |= trial.reach.functions
        self._proofs.add(trial.proof)
        self.unsure.pop(trial.proof, None)


def _name(kind: type) -> str:
    function: Any = getattr(kind, "_forward_cls", kind)
    return str(function.__qualname__)


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether two tensors of one shape differ, a NaN from anything but a NaN; as a number."""
    return ((one != other) & ~((one != one) & (other != other))).any().float()


class Trial:
    """One live microbatch whose gradients should all be zero. complete: each leaf got one."""

    def __init__(self, family: Hashable, proof: Proof, reach: Reach, buffers: Sequence[torch.Tensor]) -> None:
        self.family, self.proof, self.reach = family, proof, reach
        self.arrivals = Arrivals(reach.leaves)
        self._buffers = buffers
        self._before: list[torch.Tensor] = []
        self._sizes: list[torch.Tensor] = []
        self._arriving: Arriving | None = None
        self.complete = True

    def heard(self, gradient: torch.Tensor) -> None:
        self._sizes.append(magnitude(gradient))

    def begins(self, cotangent: torch.Tensor) -> None:
        self._before = [buffer.clone() for buffer in self._buffers]
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)

    def _ends(self) -> None:
        if not self._sizes or self._arriving is not None:
            return
        written = [_differ(buffer, before) for buffer, before in zip(self._buffers, self._before)]
        self.complete = len(self.arrivals.parameters()) == len(self.reach.leaves)
        gradient = largest(self._sizes)
        flags = largest([flag.to(gradient.device) for flag in written]) if written else torch.zeros_like(gradient)
        self._arriving = Arriving(torch.stack([gradient, flags]))
        self._sizes, self._before = [], []

    def numbers(self, wait: bool) -> tuple[float, float] | None:
        """Largest gradient, and whether a buffer was written; NaN where no backward came; None if not arrived."""
        self.arrivals.close()
        if self._arriving is None:
            return math.nan, 0.0
        if wait:
            self._arriving.wait()
        values = self._arriving.values()
        return None if values is None else (values[0], values[1])
