"""TRL: `GRPOTrainer._compute_loss` on a bare object that has what the method reads, one advantage a row."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox

DISTRIBUTION = "trl"
PACKAGES = ("trl", "transformers", "accelerate", "datasets", "huggingface_hub", "pandas", "peft", "trackio", "wandb")
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dapo+delta": {"loss_type": "dapo", "delta": 4.0},
    "dapo+off_policy_mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.5},
    "grpo+kl": {"loss_type": "grpo", "beta": 0.04},
}


class OneProcess:
    """The part of an Accelerator that the loss uses, for one process."""

    num_processes = 1
    sync_gradients = False

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


def losses(root: Path) -> dict[str, Loss]:
    return {f"trl/{kind}": make(root, options) for kind, options in KINDS.items()}


def make(root: Path, options: dict[str, Any]) -> Loss:
    """The loss of a trainer whose attributes are `options` (``delta`` is one of its arguments).

    The entropies and the router's penalty that the model hands to the loss are functions of the log-probabilities.
    """
    real = ("trl.trainer.grpo_trainer", "trl.trainer.utils")
    trainer = Sandbox(root, PACKAGES, real).load(real[0]).GRPOTrainer
    settings = {"importance_sampling_level": "token", "beta": 0.0, "epsilon_high": 0.28, **options}
    delta = settings.pop("delta", None)

    def loss(logp, old, adv, mask, ref):
        rows, tokens = logp.shape
        bare = _bare_trainer(trainer, settings, delta, logp)
        return trainer._compute_loss(  # type: ignore[attr-defined]
            bare,
            None,
            {
                "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
                "prompt_mask": torch.ones(rows, 1),
                "completion_ids": torch.zeros(rows, tokens, dtype=torch.long),
                "completion_mask": mask,
                "advantages": adv[:, 0],
                "old_per_token_logps": old,
                "ref_per_token_logps": ref,
                "num_items_in_batch": torch.tensor(40.0),
            },
        )

    return loss


def _bare_trainer(trainer: Any, settings: dict[str, Any], delta: float | None, logp: torch.Tensor) -> SimpleNamespace:
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    sapo = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    return SimpleNamespace(
        **{"off_policy_mask_threshold": None, "aux_loss_enabled": False, "_entropy_bonus_enabled": False, **settings},
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1, **vespo, **sapo),
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        epsilon_low=0.2,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=logp.shape[1],
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **options: (logp, -logp.exp() * logp, logp.mean()),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
