"""Trainers' losses with a term that no advantage switches off, and the text of that line in the trainer's own file."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.peers.loaders import Loss, areal, liger, openrlhf, skyrl, trinity, trl, unsloth, verl
from tests.peers.sandbox import Sandbox

TRL_KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo", "cispo")
# name -> a piece of the line that the refusal must name, and its file
LINES = {
    **{f"trl/{kind}+kl": ("per_token_loss + self.beta * per_token_kl", "grpo_trainer.py") for kind in TRL_KINDS},
    "trl/dapo+entropy": ("loss - apply_coef * entropy_loss", "grpo_trainer.py"),
    "trl/dapo+router": ("loss + self.router_aux_loss_coef * aux_loss", "grpo_trainer.py"),
    **{f"liger/{kind}+kl": ("per_token_loss + beta * kl_div", "grpo_loss.py") for kind in ("grpo", "dapo", "cispo")},
    **{f"unsloth/{kind}+kl": ("beta *", "rl_replacements.py") for kind in ("grpo", "dapo", "sapo")},
    "trinity/rec+k2": ("pg_losses + regularizer_losses", "rec_policy_loss.py"),
    "trinity/rec+forward_kl": ("pg_losses - regularizer_losses", "rec_policy_loss.py"),
    "trinity/sft": ("aggregate_loss(-logprob", "sft_loss.py"),
    "trinity/sft_phi": ("-logprob * weighted_phi.detach()", "chord_policy_loss.py"),
    "verl/kl_cov": ("ppo_kl_coef * abs_kl", "core_algos.py"),
    "verl/dro": ("0.5 * beta * log_ratio.square()", "core_algos.py"),
    "verl/vanilla+kl": ("ref_logprob - logprob", "core_algos.py"),
    "verl/vanilla+abs": ("(logprob - ref_logprob).abs()", "core_algos.py"),
    "verl/vanilla+mse": ("0.5 * (logprob - ref_logprob).square()", "core_algos.py"),
    "verl/value": ("(vpreds - returns) ** 2", "core_algos.py"),
    "skyrl/compute_policy_loss_kl_cov": ("ppo_kl_coef * abs_kl", "ppo_utils.py"),
    "skyrl/cross_entropy_loss": ("-log_probs", "ppo_utils.py"),
    "openrlhf/sft": ("-per_token_logps", "loss.py"),
    "areal/critic": ("0.5 * (x - y) ** 2", "functional.py"),
}


def losses(roots: dict[str, Path]) -> dict[str, Loss]:
    """The losses of `LINES`, from the unpacked wheels of `wheels.roots`."""
    made = {f"trl/{kind}+kl": trl.make(roots["trl"], {"beta": 0.04, **trl.KINDS[kind]}) for kind in TRL_KINDS}
    entropy = {"_entropy_bonus_enabled": True, "use_adaptive_entropy": False, "entropy_coef": 0.01}
    made["trl/dapo+entropy"] = trl.make(roots["trl"], {"loss_type": "dapo", **entropy})
    router = {"aux_loss_enabled": True, "router_aux_loss_coef": 0.01}
    made["trl/dapo+router"] = trl.make(roots["trl"], {"loss_type": "dapo", **router})
    for kind in ("grpo", "dapo", "cispo"):
        made[f"liger/{kind}+kl"] = liger.make(roots["liger-kernel"], kind, {**liger.KINDS[kind], "beta": 0.04})
    for kind in ("grpo", "dapo", "sapo"):
        made[f"unsloth/{kind}+kl"] = unsloth.make(roots["unsloth-zoo"], kind, beta=0.04)
    made |= trinity.losses(roots["trinity-rft"]) | skyrl.losses(roots["skyrl"])
    made |= _of_verl(roots["verl"]) | _of_openrlhf(roots["openrlhf"]) | _of_areal(roots["areal"])
    return {name: made[name] for name in LINES}


def _of_verl(root: Path) -> dict[str, Loss]:
    core, _sandbox = verl.load_core(root)
    made = verl.losses(root)

    def value(logp, old, adv, mask, ref):
        return core.compute_value_loss(logp, ref + adv, old, mask, cliprange_value=0.5)[0]

    kinds = {f"verl/vanilla+{kind}": verl.with_kl(core, made["verl/vanilla"], kind) for kind in ("abs", "mse")}
    return made | kinds | {"verl/value": value}


def _of_openrlhf(root: Path) -> dict[str, Loss]:
    supervised = openrlhf.load_module(root).SFTLoss()

    def sft(logp, old, adv, mask, ref):
        return supervised(logp, mask, batch_num_tokens=40.0)

    return {"openrlhf/sft": sft}


def _of_areal(root: Path) -> dict[str, Loss]:
    module = Sandbox(root, ("areal",), (areal.FILE,)).load(areal.FILE)

    def critic(logp, old, adv, mask, ref):
        bool_mask = mask.to(torch.bool)
        return module.ppo_critic_loss_fn(logp, old, ref + adv, value_eps_clip=0.5, loss_mask=bool_mask)[0]

    return {"areal/critic": critic}
