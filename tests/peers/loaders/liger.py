"""Liger: the loss inside its fused linear GRPO function, one advantage a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox

DISTRIBUTION = "liger-kernel"
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("grpo", "dapo", "dr_grpo", "sapo", "vespo")},
    "cispo": {"epsilon_high": 5.0},
    "luspo": {"importance_sampling_level": "sequence"},
}


def losses(root: Path) -> dict[str, Loss]:
    return {f"liger/{kind}": make(root, kind, options) for kind, options in KINDS.items()}


def make(root: Path, kind: str, options: dict[str, Any]) -> Loss:
    real = ("liger_kernel.chunked_loss.grpo_loss", "liger_kernel.chunked_loss.fused_linear_ppo")
    function = Sandbox(root, ("liger_kernel",), real).load(real[0]).LigerFusedLinearGRPOFunction.ppo_loss_fn
    settings = {"loss_type": kind, "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28, **options}

    def loss(logp, old, adv, mask, ref):
        value, _metrics = function(
            per_token_logps=logp,
            attention_mask=mask,
            full_attention_mask=mask,
            advantages=adv[:, 0],
            old_per_token_logps=old,
            ref_per_token_logps=ref,
            max_completion_length=logp.shape[1],
            num_items_in_batch=40.0,
            **settings,
        )
        return value

    return loss
