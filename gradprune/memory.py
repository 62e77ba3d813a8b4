"""How much larger a dead microbatch may be: it keeps no activations for a backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradprune.errors import PlanError
from gradprune.planning.rollout import read_whole


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes a token holds at the peak of a live and of a dead microbatch. A ratio of the two is all that is used."""

    live: float
    dead: float

    def __post_init__(self) -> None:
        for name, value in (("live", self.live), ("dead", self.dead)):
            if not 0 < value < math.inf:
                raise PlanError(f"{name} is {value}: pass bytes a token holds, more than 0")

    @classmethod
    def of_transformer(cls, *, layers: int, hidden: int, vocabulary: int, recompute: bool = False) -> ActivationMemory:
        """Of a 16-bit transformer whose attention stores no scores.

        A layer holds 34 bytes per hidden unit and token (Korthikanti et al. 2022, "Reducing Activation Recomputation in
        Large Transformer Models", equation 1 without its attention term), with full recompute 2; the logits are held
        twice in 32 bits. A dead microbatch holds one layer at a time, and the logits.
        """
        layers, hidden = read_whole("layers", layers), read_whole("hidden", hidden)
        vocabulary = read_whole("vocabulary", vocabulary)
        layer, logits = 34.0 * hidden, 8.0 * vocabulary
        kept = layers * 2.0 * hidden + layer if recompute else layers * layer
        return cls(kept + logits, layer + logits)

    def dead_token_budget(self, token_budget: int) -> int:
        """Tokens of a dead microbatch that take the memory of a live one of `token_budget` tokens; never fewer."""
        return max(int(token_budget * self.live / self.dead), token_budget)
