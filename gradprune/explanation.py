"""What a compiled step decided, microbatch by microbatch, and the verdicts that it decided on."""

from __future__ import annotations

from dataclasses import dataclass

from gradprune.facts import Dead, Live, Verdict


@dataclass(frozen=True)
class Decision:
    """One microbatch: `index` counts this step's calls from 0."""

    index: int
    outcome: Live | Dead

    def __str__(self) -> str:
        return f"microbatch {self.index:>4}  {'live' if self.outcome else 'dead'}  {self.outcome.reason}"


@dataclass(frozen=True)
class Explanation:
    """Printing it explains; `decisions` and `verdicts` are there for programs. Old decisions are dropped."""

    name: str
    decisions: tuple[Decision, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def dead(self) -> int:
        return sum(not decision.outcome for decision in self.decisions)

    def __str__(self) -> str:
        head = f"{self.name}: {len(self.decisions)} microbatches, {self.dead} dead"
        if not self.verdicts:
            head += "; nothing to prove yet: no microbatch satisfied the hypothesis"
        return "\n".join([head, *map(str, self.decisions), *map(str, self.verdicts)])
