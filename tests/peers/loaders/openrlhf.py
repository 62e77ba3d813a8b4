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
    packages = ("openrlhf", "flash_attn", "transformers", "deepspeed")
    module = Sandbox(root, packages, ("openrlhf.models.loss", "openrlhf.models.utils")).load("openrlhf.models.loss")
    return {f"openrlhf/{kind}": _loss(module.PolicyLoss(**options)) for kind, options in KINDS.items()}


def _loss(module: Any) -> Loss:
    def loss(logp, old, adv, mask, ref):
        totals = {"batch_num_tokens": 40.0, "global_batch_size": 6.0}
        return module(logp, old, adv, action_mask=mask, rollout_log_probs=old - 0.1, **totals)[0]

    return loss
