"""How much larger a dead microbatch may be: it keeps no activations for a backward."""

from __future__ import annotations

from dataclasses import dataclass

from gradprune.errors import PlanError


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes a token holds at the peak of a live and of a dead microbatch. A ratio of the two is all that is used."""

    live: float
    dead: float

    @classmethod
    def of_transformer(cls, *, layers: int, hidden: int, vocabulary: int, recompute: bool = False) -> ActivationMemory:
        """Of a 16-bit transformer whose attention stores no scores.

        A layer holds 34 bytes per hidden unit and token (Korthikanti et al. 2022, "Reducing Activation Recomputation in
        Large Transformer Models", equation 1 without its attention term), with full recompute 2; the logits are held
        twice in 32 bits. A dead microbatch holds one layer at a time, and the logits.
        """
        for name, value in (("layers", layers), ("hidden", hidden), ("vocabulary", vocabulary)):
            if value < 1:
                raise PlanError(f"{name} is {value}: pass the model's, at least 1")
        layer, logits = 34.0 * hidden, 8.0 * vocabulary
        kept = layers * 2.0 * hidden + layer if recompute else layers * layer
        return cls(kept + logits, layer + logits)

    def dead_token_budget(self, token_budget: int) -> int:
        """Tokens of a dead microbatch that take the memory of a live one of `token_budget` tokens; never fewer."""
        return max(int(token_budget * self.live / self.dead), token_budget)
