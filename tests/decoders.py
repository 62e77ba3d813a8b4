"""Small decoders of every kind that the FLOP count must know: dense, grouped-query, experts, LoRA, tied head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class DecoderConfig:
    """Field names as Hugging Face writes them, as far as it has them."""

    hidden_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 4
    intermediate_size: int = 24
    vocab_size: int = 40
    gated: bool = True
    bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 2
    tie_word_embeddings: bool = False
    lora_rank: int = 0
    checkpointing: Literal["none", "reentrant", "non-reentrant"] = "none"


class Linear(nn.Linear):
    """A linear map with an optional low-rank update, the base weight frozen."""

    def __init__(self, config: DecoderConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=config.bias)
        self.lora_a = self.lora_b = None
        if config.lora_rank:
            self.lora_a = nn.Linear(inputs, config.lora_rank, bias=False)
            self.lora_b = nn.Linear(config.lora_rank, outputs, bias=False)

    def forward(self, x):
        out = super().forward(x)
        return out if self.lora_a is None else out + self.lora_b(self.lora_a(x))


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate = Linear(config, hidden, inner) if config.gated else None
        self.up, self.down = Linear(config, hidden, inner), Linear(config, inner, hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Top-k routing, no token dropped; an expert without tokens still runs, on zero rows."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.num_experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(flat[row]) * weights[row, slot, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q = Linear(config, config.hidden_size, self.heads * self.width)
        self.k = Linear(config, config.hidden_size, self.kv_heads * self.width)
        self.v = Linear(config, config.hidden_size, self.kv_heads * self.width)
        self.o = Linear(config, self.heads * self.width, config.hidden_size)
        self.ffn = Experts(config) if config.num_experts else FeedForward(config)
        self.norms = nn.ModuleList(nn.LayerNorm(config.hidden_size, bias=False) for _ in range(2))

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (
            proj(y).unflatten(-1, (heads, self.width)).transpose(1, 2)
            for proj, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norms[1](x))


class Decoder(nn.Module):
    """tokens [R, T] -> log-probs of the next token [R, T - 1]; the head runs on all T positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.lora_rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".lora_" in name)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.config.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.config.checkpointing == "reentrant")
        logp = self.head(x).log_softmax(-1)
        return logp[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


KINDS = {
    "dense": DecoderConfig(),
    "biased": DecoderConfig(bias=True, gated=False),
    "gqa": DecoderConfig(num_key_value_heads=2),
    "wide-heads": DecoderConfig(head_dim=6),
    "moe": DecoderConfig(num_experts=4),
    "lora": DecoderConfig(lora_rank=3),
    "tied": DecoderConfig(tie_word_embeddings=True),
    "reentrant": DecoderConfig(checkpointing="reentrant"),
    "non-reentrant": DecoderConfig(checkpointing="non-reentrant", num_key_value_heads=2),
}


def make_decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(config)


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(seed))


def policy_loss(logp: torch.Tensor) -> torch.Tensor:
    """A clipped policy loss with a fixed advantage."""
    ratio = torch.exp(logp - logp.detach() - 0.01)
    advantage = torch.linspace(-1, 1, logp.shape[0])[:, None]
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
