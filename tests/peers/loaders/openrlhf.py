"""OpenRLHF: its `PolicyLoss` module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox

DISTRIBUTION = "openrlhf"
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo+dual_clip": {"dual_clip": 3.0},
    "gspo": {"policy_loss_type": "gspo"},
    "ppo+token_is": {"is_correction_level": "token"},
}


def losses(root: Path) -> dict[str, Loss]:
    policy = load_module(root).PolicyLoss
    return {f"openrlhf/{kind}": _loss(policy(**options)) for kind, options in KINDS.items()}


def load_module(root: Path) -> Any:
    """OpenRLHF's module of losses."""
    real = ("openrlhf.models.loss", "openrlhf.models.utils")
    return Sandbox(root, ("openrlhf", "flash_attn", "transformers", "deepspeed"), real).load(real[0])


def _loss(module: Any) -> Loss:
    def loss(logp, old, adv, mask, ref):
        totals = {"batch_num_tokens": 40.0, "global_batch_size": 6.0}
        return module(logp, old, adv, action_mask=mask, rollout_log_probs=old - 0.1, **totals)[0]

    return loss
