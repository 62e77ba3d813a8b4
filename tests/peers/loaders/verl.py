"""verl: every policy loss of its registry that stands by itself, and two ways in which its actor combines them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox, Settings

DISTRIBUTION = "verl"
PACKAGES = ("verl", "tensordict", "transformers", "omegaconf", "ray", "flash_attn", "mindspeed", "torch_npu")
REAL = ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper", "verl.utils.torch_functional")
KINDS = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo")
TOKENS = 40.0  # of the global batch
SEED = 7  # clip_cov draws a permutation


def losses(root: Path) -> dict[str, Loss]:
    core, sandbox = load_core(root)
    made = {f"verl/{kind}": _loss(core.POLICY_LOSS_REGISTRY[kind]) for kind in KINDS}
    return made | {
        "verl/vanilla+kl": with_kl(core, made["verl/vanilla"], "low_var_kl"),
        "verl/bypass_ppo_clip": _bypass(core, sandbox),
    }


def load_core(root: Path) -> tuple[Any, Sandbox]:
    """verl's module of losses, and the sandbox that it was imported in."""
    sandbox = Sandbox(root, PACKAGES, REAL)
    core = sandbox.load(REAL[0])
    for name in REAL[1:]:  # the names through which the losses reach other files are bound to fakes until then
        sandbox.load(name)
    core.verl_F = sandbox.own[REAL[2]]
    sandbox.own[REAL[1]].verl_F = core.verl_F
    core.ActorConfig = Settings  # an isinstance check picks the settings' type
    return core, sandbox


def _settings(**policy_loss: Any) -> Settings:
    policy = {"clip_cov_ratio": 0.3, "clip_cov_lb": 1e-4, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0}
    shares = {"dp_size": 1, "batch_num_tokens": torch.tensor(TOKENS), "global_batch_size": 6, "loss_scale_factor": None}
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    return Settings(
        clip,
        tau_pos=1.0,
        tau_neg=1.05,
        policy_loss=Settings(policy, dro_beta=0.1, **policy_loss),
        global_batch_info=shares,
    )


def _loss(function: Any) -> Loss:
    settings = _settings()

    def loss(logp, old, adv, mask, ref):
        torch.manual_seed(SEED)
        value, _metrics = function(
            old_log_prob=old,
            log_prob=logp,
            advantages=adv,
            response_mask=mask.bool(),
            loss_agg_mode="token-mean",
            config=settings,
        )
        return value

    return loss


def with_kl(core: Any, policy: Loss, kind: str) -> Loss:
    """A policy loss with a divergence from the reference added, as the actor adds it."""

    def loss(logp, old, adv, mask, ref):
        kl = core.kl_penalty(logprob=logp, ref_logprob=ref, kl_penalty=kind)
        tokens = torch.tensor(TOKENS)
        kl_loss = core.agg_loss(kl, mask.bool(), "token-mean", batch_num_tokens=tokens)
        return policy(logp, old, adv, mask, ref) + kl_loss * 0.01

    return loss


def _bypass(core: Any, sandbox: Sandbox) -> Loss:
    correction = {"loss_type": "ppo_clip", "rollout_is": None, "rollout_is_threshold": 2.0}
    settings = _settings(rollout_correction=Settings(correction, rollout_rs=None, rollout_rs_threshold=None))
    function = core.compute_policy_loss_bypass_mode

    def loss(logp, old, adv, mask, ref):
        with sandbox:  # it imports a helper when it is called
            value, _metrics = function(old, logp, adv, mask.bool(), "token-mean", settings)
        return value

    return loss
