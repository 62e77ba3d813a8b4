"""Rollouts with the lengths and rewards of GRPO runs, and what a sequence costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rollout:
    """lengths [N] in tokens; advantages [N], exactly zero in dead groups; group_size: N is a multiple of it."""

    lengths: np.ndarray
    advantages: np.ndarray
    group_size: int

    @property
    def dead(self) -> np.ndarray:
        return self.advantages == 0


def sample_rollout(sequences: int, group_size: int, dead_share: float, seed: int = 0) -> Rollout:
    """Binary rewards of prompts with a solve rate each; the longer the harder the prompt.

    Solve rates are Beta(c, c), with c such that about `dead_share` of the groups come out all right or all wrong.
    Lengths are log-normal around a median of 450 (always solved) to 1800 tokens (never solved), cut at 8192.
    """
    rng = np.random.default_rng([seed, sequences, group_size, int(100 * dead_share)])
    groups = sequences // group_size
    rate = rng.beta(*[_concentration(group_size, dead_share)] * 2, groups)
    solved = rng.random((groups, group_size)) < rate[:, None]
    centred = solved - solved.mean(axis=1, keepdims=True)
    advantages = centred / (solved.std(axis=1, keepdims=True) + 1e-6)
    advantages[solved.all(axis=1) | ~solved.any(axis=1)] = 0.0
    median = 1800.0 * 0.25**rate
    lengths = median[:, None] * np.exp(0.7 * rng.standard_normal((groups, group_size)))
    return Rollout(np.clip(lengths.ravel(), 16, 8192).astype(np.int64), advantages.ravel(), group_size)


def _concentration(group_size: int, dead_share: float) -> float:
    """c with P(all equal | Beta(c, c)) = 2 * prod (c + i) / (2c + i), i < group_size, equal to dead_share; bisected."""
    low, high = 1e-4, 1e3
    i = np.arange(group_size)
    for _ in range(100):
        middle = (low * high) ** 0.5
        share = 2 * np.prod((middle + i) / (2 * middle + i))
        low, high = (middle, high) if share > dead_share else (low, middle)
    return low


def qwen3_4b_forward(lengths: np.ndarray) -> np.ndarray:
    """Forward FLOPs of each sequence: 36 layers of hidden 2560, 32 heads of 128 (8 for keys), FFN 9728, 151936 words.

    Two FLOPs a weight and token, and 4 * heads * head_dim for each of L (L + 1) / 2 causal pairs and layer.
    """
    layer = 2560 * (2 * 4096 + 2 * 1024) + 3 * 2560 * 9728
    weights = 36 * layer + 2560 * 151936
    length = lengths.astype(np.float64)
    return 2.0 * weights * length + 36 * 4 * 4096 * length * (length + 1) / 2
