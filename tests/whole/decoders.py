"""Small decoders in plain torch: each part of one that a proof of a whole step has to go through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.whole.steps import VOCABULARY

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Causal self-attention, by the fused kernel or written out."""

    def __init__(self, fused: bool, dropout: float) -> None:
        super().__init__()
        self.fused, self.dropout = fused, dropout
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = hidden.shape
        split = self.inward(hidden).view(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
            later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            mixed = F.dropout(weights, self.dropout, self.training) @ value
        return self.outward(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))


class Block(nn.Module):
    def __init__(self, fused: bool, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(fused, dropout)
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.drop(self.attention(self.before(hidden)))
        inner = self.between(hidden)
        return hidden + self.drop(self.down(F.silu(self.gate(inner)) * F.gelu(self.up(inner))))


class Decoder(nn.Module):
    """Tokens ``[R, T]`` to logits ``[R, T, V]``. `recompute`: every block under activation checkpointing."""

    def __init__(self, *, fused: bool = True, dropout: float = 0.0, recompute: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.recompute = recompute
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(fused, dropout) for _ in range(2))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return self.last(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


class WithValueHead(Decoder):
    """Logits and a value for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden(tokens)
        return self.head(hidden), self.value(hidden).squeeze(-1)


class Experts(nn.Module):
    """Top-1 of a few experts. `penalty`: "balance", "z" or None, kept in `extra` for the step to add."""

    def __init__(self, penalty: str | None) -> None:
        super().__init__()
        self.penalty = penalty
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.extra: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.router(hidden)
        shares = scores.softmax(-1)
        best, chosen = shares.max(-1)
        mixed = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            mixed = mixed + expert(hidden) * (best * (chosen == index)).unsqueeze(-1)
        if self.penalty == "balance":
            load = F.one_hot(chosen, 4).float().mean((0, 1))
            self.extra = 4 * (load * shares.mean((0, 1))).sum()
        if self.penalty == "z":
            self.extra = torch.logsumexp(scores, -1).square().mean()
        return hidden + mixed


class ExpertDecoder(Decoder):
    def __init__(self, penalty: str | None) -> None:
        super().__init__()
        self.mixture = Experts(penalty)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixture(self.hidden(tokens)))


class TwoTokensAhead(Decoder):
    """A second head that predicts the token after the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden(tokens)
        return self.head(hidden), self.ahead(hidden)


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + F.linear(F.linear(hidden, self.down), self.up)


class _Riding(torch.autograd.Function):
    """The identity, through which a penalty gets its own gradient: how some routers add a loss that no step sees."""

    @staticmethod
    def forward(ctx, hidden, penalty):
        ctx.save_for_backward(penalty)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        (penalty,) = ctx.saved_tensors
        return grad, torch.ones_like(penalty) * 0.01


class RidingExperts(Experts):
    """Experts whose balance penalty rides on the hidden states."""

    def __init__(self) -> None:
        super().__init__("balance")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = super().forward(hidden)
        return _Riding.apply(mixed, self.extra)


class RidingDecoder(ExpertDecoder):
    def __init__(self) -> None:
        super().__init__(None)
        self.mixture = RidingExperts()


def with_low_rank() -> Decoder:
    """A frozen decoder whose attention has low-rank updates."""
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.inward = LowRank(block.attention.inward)  # type: ignore[assignment]
    return model
