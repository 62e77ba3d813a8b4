"""Unsloth: the loss of its GRPO trainer, uncompiled, one advantage a row."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox

DISTRIBUTION = "unsloth-zoo"
FILE = "unsloth_zoo.rl_replacements"


def losses(root: Path) -> dict[str, Loss]:
    return {f"unsloth/{kind}": make(root, kind) for kind in ("grpo", "dapo", "cispo", "sapo")}


def make(root: Path, kind: str, beta: float = 0.0) -> Loss:
    function = Sandbox(root, ("unsloth_zoo", "unsloth", "triton"), (FILE,)).load(FILE).grpo_compute_loss
    clip = {"epsilon_low": 0.2, "epsilon_high": 5.0 if kind == "cispo" else 0.28}

    def loss(logp, old, adv, mask, ref):
        ids = torch.zeros(logp.shape, dtype=torch.long)
        totals = {"num_items_in_batch": 40.0, "max_completion_length": logp.shape[1]}
        outputs = function(ref, logp, old, None, ids, mask, beta, adv[:, 0], loss_type=kind, **clip, **totals)
        return outputs[0]

    return loss
