"""A real GRPOTrainer, pruned and not, from one seed: the same parameters, the same logs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: pip install gradprune[trl]")

from peft import LoraConfig

from gradprune.errors import NoEffectWarning, PruneError
from gradprune.trainers.trl import prune
from tests.trainers.grpo import make_trainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]

PRUNED: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss} for loss in LOSSES},
    "sequence level": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "several iterations": {"num_iterations": 2},
    "rollout for two steps": {"steps_per_generation": 8, "num_iterations": 2},
    "delta and unscaled": {"loss_type": "grpo", "delta": 1.5, "scale_rewards": "none"},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "masked truncated": {"mask_truncated_completions": True},
    "checkpointing": {"activation_checkpointing": True},
    "LoRA": {"peft_config": True},
    "audited": {},
}

KEPT: dict[str, dict[str, Any]] = {
    "reference KL": {"beta": 0.04},
    "entropy bonus": {"entropy_coef": 0.01},
}

_TIMES = ("time", "runtime", "per_second", "gradprune")


def train(folder: Any, pruned: bool, options: dict[str, Any], **prune_options: Any) -> Any:
    options = dict(options)
    if options.get("peft_config"):
        options["peft_config"] = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(str(folder), **options)
    step = prune(trainer, **prune_options) if pruned else None
    trainer.train()
    return trainer, step


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in _TIMES)}
        for entry in trainer.state.log_history
    ]


def assert_same(pruned: Any, unpruned: Any) -> None:
    ours, theirs = dict(pruned.model.named_parameters()), dict(unpruned.model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), f"{name} differs"
    assert logs_of(pruned) == logs_of(unpruned)


@pytest.mark.parametrize("name", PRUNED)
def test_prunes(tmp_path, name):
    unpruned, _ = train(tmp_path / "a", False, PRUNED[name])
    pruned, step = train(tmp_path / "b", True, PRUNED[name], strict=True, audit=float(name == "audited"))
    assert_same(pruned, unpruned)
    decisions = step.explain().decisions
    assert len(decisions) == 40
    assert 10 <= step.explain().dead < 40
    zero = [float(not decision.outcome) for decision in decisions]
    shares = [entry["gradprune/dead_share"] for entry in pruned.state.log_history if "gradprune/dead_share" in entry]
    assert shares == [sum(zero[first : first + 4]) / 4 for first in range(0, 40, 4)]


@pytest.mark.parametrize("name", KEPT)
def test_keeps(tmp_path, name):
    unpruned, _ = train(tmp_path / "a", False, KEPT[name])
    with pytest.warns(NoEffectWarning, match="refused"):
        pruned, step = train(tmp_path / "b", True, KEPT[name])
    assert_same(pruned, unpruned)
    assert step.explain().dead == 0


def test_refuses_other_objects_and_a_second_time(tmp_path):
    with pytest.raises(PruneError, match=r"pass a trl\.GRPOTrainer"):
        prune(object())
    trainer = make_trainer(str(tmp_path))
    prune(trainer)
    with pytest.raises(PruneError, match="pruned already"):
        prune(trainer)


def test_adds_no_warnings(tmp_path):
    with warnings.catch_warnings(record=True) as unpruned:
        warnings.simplefilter("always")
        train(tmp_path / "a", False, {"max_steps": 2})
    with warnings.catch_warnings(record=True) as pruned:
        warnings.simplefilter("always")
        train(tmp_path / "b", True, {"max_steps": 2})
    assert {str(item.message) for item in pruned} <= {str(item.message) for item in unpruned}


def test_example_prunes():
    from examples.trl_grpo import main

    assert 0 < main() < 1
