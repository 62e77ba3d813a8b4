"""SkyRL: the policy losses of its torch backend, without off-policy correction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox, Settings

DISTRIBUTION = "skyrl"
FOLDER = "skyrl.backends.skyrl_train.utils"
PACKAGES = ("skyrl", "ray", "jaxtyping", "loguru", "cloudpickle", "omegaconf", "flash_attn", "tensordict")
NAMES = (
    "ppo_policy_loss",
    "sapo_policy_loss",
    "gspo_policy_loss",
    "compute_policy_loss_cispo",
    "rollout_is_policy_loss",
    "dppo_policy_loss",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_kl_cov",
    "cross_entropy_loss",
    "importance_sampling_loss",
)
SEED = 7  # clip_cov draws a permutation
SETTINGS = Settings(
    policy_loss_type="dual_clip",
    loss_reduction="sequence_mean",
    eps_clip_low=0.2,
    eps_clip_high=0.28,
    clip_ratio_c=3.0,
    sapo=Settings(tau_pos=1.0, tau_neg=1.05),
    cispo=Settings(cispo_anchor="old", cispo_eps_clip_low=0.2, cispo_eps_clip_high=4.0),
    dppo=Settings(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
    clip_cov=Settings(clip_ratio=0.3, clip_cov_lb=1e-4, clip_cov_ub=5.0),
    kl_cov=Settings(kl_cov_frac=0.3, ppo_kl_coef=1.0),
    off_policy_correction=Settings(
        tis_ratio_type=None,
        sequence_mask_metric=None,
        outlier_token_is_threshold_low=None,
        outlier_token_is_threshold_high=None,
        token_mask_is_threshold_low=None,
        token_mask_is_threshold_high=None,
    ),
)


def losses(root: Path) -> dict[str, Loss]:
    files = tuple(f"{FOLDER}.{name}" for name in ("ppo_utils", "torch_utils", "off_policy_correction_utils"))
    module = Sandbox(root, PACKAGES, files).load(files[0])
    return {f"skyrl/{name}": _loss(getattr(module, name)) for name in NAMES}


def _loss(function: Any) -> Loss:
    def loss(logp, old, adv, mask, ref):
        torch.manual_seed(SEED)
        value, _metrics = function(logp, old, adv, config=SETTINGS, loss_mask=mask, rollout_logprobs=old)
        return value

    return loss
