"""Trinity-RFT: its policy-loss classes, called with keywords as its trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox

DISTRIBUTION = "trinity-rft"
FOLDER = "trinity.algorithm.policy_loss_fn"
ASYMMETRIC = {"clip_range_low": 0.2, "clip_range_high": 0.28}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("ppo_policy_loss", "PPOPolicyLossFn", {"clip_range": 0.2}),
    "opmd": ("opmd_policy_loss", "OPMDPolicyLossFn", {}),
    "gspo": ("gspo_policy_loss", "GSPOLossFn", ASYMMETRIC),
    "cispo": ("cispo_policy_loss", "CISPOPolicyLossFn", ASYMMETRIC),
    "sppo": ("sppo_loss_fn", "sPPOPolicyLossFn", {}),
    "sapo": ("sapo_policy_loss", "SAPOPolicyLossFn", {}),
    "importance_sampling": ("importance_sampling_policy_loss", "ImportanceSamplingLossFn", {}),
    "rec": ("rec_policy_loss", "RECPolicyLossFn", {}),
    "rec+k2": ("rec_policy_loss", "RECPolicyLossFn", {"regularizer": "k2", "regularizer_coef": 0.1}),
    "rec+forward_kl": ("rec_policy_loss", "RECPolicyLossFn", {"regularizer": "forward-kl", "regularizer_coef": 0.1}),
    "sft": ("sft_loss", "SFTLossFn", {}),
    "sft_phi": ("chord_policy_loss", "SFTPhiLossFn", {}),
}


def losses(root: Path) -> dict[str, Loss]:
    real = (FOLDER, f"{FOLDER}.*", "trinity.algorithm.utils", "trinity.algorithm.key_mapper")
    sandbox = Sandbox(root, ("trinity",), real)
    made = {}
    for kind, (module, name, options) in KINDS.items():
        made[f"trinity/{kind}"] = _loss(getattr(sandbox.load(f"{FOLDER}.{module}"), name)(**options))
    return made


def _loss(function: Any) -> Loss:
    def loss(logp, old, adv, mask, ref):
        value, _metrics = function(logprob=logp, old_logprob=old, advantages=adv, action_mask=mask.bool())
        return value

    return loss
