"""The verdicts that one compiled step has collected, and which of them to expect for the microbatch at hand."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradprune.facts import Certificate, Verdict
from gradprune.runtime.checks import Checks, checks_of
from gradprune.runtime.graphs import Arrivals
from gradprune.runtime.python_state import PythonState, capture
from gradprune.runtime.tape import Tape
from gradprune.trace.admission import Admission, Shapes

#: A step whose calls differ from microbatch to microbatch is not proved again and again: it runs live from then on.
MOST_VERDICTS = 32

#: A refused program is looked at again once in so many candidates: what changed it may not be seen from outside.
LOOK_AGAIN = 16


@dataclass(frozen=True, eq=False)
class Proof:
    """A verdict on one program, for the sizes that `admission` admits.

    entries: the modules at which the model began. reached: the parameters behind them into which gradient would flow.
    buffers: those that the forward writes to. communicates: the step issues collectives itself, outside the model.
    wide: the model's outputs are so much larger than the batch that the loss's own backward is worth saving. hidden:
    learns what else is reached, where the graph hides a part of itself. silent: leaves of the tape for which the loss's
    backward has None. linked: the outputs of the model that require grad. against: why its runs must stay live.
    """

    verdict: Verdict
    tape: Tape
    admission: Admission
    entries: tuple[weakref.ref[torch.nn.Module], ...]
    reached: tuple[weakref.ref[torch.Tensor], ...]
    buffers: tuple[weakref.ref[torch.Tensor], ...]
    communicates: bool = False
    wide: bool = False
    hidden: Arrivals | None = None
    stateful: bool = False
    linked: frozenset[str] = frozenset()
    silent: set[int] = field(default_factory=set)
    against: list[str] = field(default_factory=list)

    @functools.cached_property
    def checks(self) -> Checks:
        """Where the side conditions can be looked at while the loss is computed."""
        conditions = self.verdict.conditions if isinstance(self.verdict, Certificate) else ()
        return checks_of(conditions, self.tape)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model outputs through which gradient would flow."""
        return tuple(leaf.name for leaf in self.tape.leaves if leaf.role == "wrt")

    def modules(self) -> list[torch.nn.Module]:
        return [module for ref in self.entries if (module := ref()) is not None]

    def parameters(self) -> list[torch.Tensor]:
        seen = [parameter for ref in self.reached if (parameter := ref()) is not None]
        return seen if self.hidden is None else [*seen, *self.hidden.parameters()]

    @property
    def alive(self) -> bool:
        """Whether the modules and parameters that it speaks of still exist: an id may be another's by now."""
        held: tuple[weakref.ref[Any], ...] = (*self.entries, *self.reached)
        return all(ref() is not None for ref in held if not isinstance(ref, _PassingRef))

    @property
    def runnable(self) -> bool:
        """Whether enough is known to run a microbatch dead."""
        return self.hidden is None or self.hidden.complete

    def written_buffers(self) -> list[torch.Tensor]:
        return [buffer for ref in self.buffers if (buffer := ref()) is not None]


@dataclass
class ProofBook:
    """Proofs of one step by program, and which one the next microbatch of a family is expected to match.

    A *family* is what is known before a microbatch runs (kinds of tensors, modes); a *program* is a tape's content.
    """

    function: Callable[..., Any]
    _proofs: dict[Hashable, list[Proof]] = field(default_factory=dict)
    _expected: dict[Hashable, Proof] = field(default_factory=dict)
    _state: PythonState | None = None
    _irrelevant: set[str] = field(default_factory=set)
    _refused: int = 0

    def expected(self, family: Hashable) -> Proof | None:
        """What the next microbatch of this family will match, unless Python state that may matter has changed."""
        if self._state is None or self._state.changed():
            return None
        proof = self._expected.get(family)
        if proof is not None and not proof.alive:
            return None
        if proof is not None and not proof.verdict:
            self._refused += 1
            return proof if self._refused % LOOK_AGAIN else None
        return proof

    def settled(self) -> bool:
        """Whether all that was seen is expected to be proved, and no Python state has changed since."""
        if self._state is None or self._state.changed() or not self._expected:
            return False
        return all(proof.verdict for proof in self._expected.values())

    def known(self, program: Hashable, shapes: Shapes) -> Proof | None:
        proofs = self._proofs.get(program, ())
        return next((proof for proof in proofs if proof.alive and proof.admission.admits(shapes)), None)

    def full(self) -> bool:
        return len(self.proofs()) >= MOST_VERDICTS

    def saw(self, family: Hashable, program: Hashable, proof: Proof) -> None:
        """A microbatch of this family ran, and `proof` speaks of its program."""
        proofs = self._proofs.setdefault(program, [])
        if proof not in proofs:
            proofs.append(proof)
        changed = self._state.changed() if self._state is not None else []
        if self._state is not None and self._expected.get(family) is proof:
            # It changed and nothing came of it: a counter, a log.
            self._irrelevant.update(changed)
            self._state.forget(changed)
        elif self._state is None or changed:
            self._expected.clear()
            self._state = capture(self.function)
            self._state.forget([name for name in self._irrelevant if name in self._state])
        self._expected[family] = proof

    def doubt(self, family: Hashable) -> None:
        """The expected proof did not match: observe the next microbatch of this family."""
        self._expected.pop(family, None)

    def proofs(self) -> list[Proof]:
        return [proof for proofs in self._proofs.values() for proof in proofs]

    def verdicts(self) -> list[Verdict]:
        return [proof.verdict for proof in self.proofs()]


class _PassingRef(weakref.ref):  # type: ignore[type-arg]
    """Of a leaf that comes and goes with its microbatch, such as what a pipeline stage has received."""


def weak(items: Sequence[Any]) -> tuple[Any, ...]:
    kept = (torch.nn.Parameter, torch.nn.Module)
    return tuple(weakref.ref(item) if isinstance(item, kept) else _PassingRef(item) for item in items)
