"""Whole-step proofs on decoders in plain torch: model and loss in one graph, every parameter's gradient zero or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradprune import prove, trace
from gradprune.facts import Certificate, Refusal
from tests.whole import decoders, steps

PROVED: dict[str, Callable[[], torch.nn.Module]] = {
    "fused attention, tied head": decoders.Decoder,
    "attention written out, dropout": lambda: decoders.Decoder(fused=False, dropout=0.1),
    "checkpointing, dropout": lambda: decoders.Decoder(recompute=True, dropout=0.1),
    "head of its own": lambda: decoders.Decoder(tied=False),
    "low-rank updates of frozen weights": decoders.with_low_rank,
    "experts without a penalty": lambda: decoders.ExpertDecoder(None),
}
LIVE = {
    "router balance": (lambda: decoders.ExpertDecoder("balance"), steps.step_with_router_penalty, "extra"),
    "router z-loss": (lambda: decoders.ExpertDecoder("z"), steps.step_with_router_penalty, "extra"),
    "two tokens ahead": (decoders.TwoTokensAhead, steps.step_two_tokens_ahead, "further"),
    "value head": (decoders.WithValueHead, steps.step_with_value, "critic"),
    "reference divergence": (decoders.Decoder, steps.step_with_reference, "divergence"),
    "decay in the loss": (decoders.Decoder, steps.step_with_decay_in_the_loss, "value.square()"),
    "penalty riding on the hidden states": (decoders.RidingDecoder, steps.policy_step, "_Riding.apply"),
}


def prove_step(step, model):
    return prove(step, (model, steps.make_batch()), zero="advantages * mask", wrt="parameters")


@pytest.mark.parametrize("kind", PROVED)
def test_proves_whole_step(kind: str) -> None:
    torch.manual_seed(0)
    model = PROVED[kind]()
    verdict = prove_step(steps.policy_step, model)
    assert isinstance(verdict, Certificate), str(verdict)
    assert verdict.depth == "step"
    gradients = steps.gradients(steps.policy_step, model, steps.make_batch())
    assert gradients
    for name, gradient in gradients.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.parametrize("kind", ["fused attention, tied head", "checkpointing, dropout"])
def test_proves_whole_step_of_any_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a small module is traced, with symbols for sizes."""
    monkeypatch.setattr(trace, "MOST_PARAMETERS", 64)
    verdict = prove_step(steps.policy_step, PROVED[kind]())
    assert isinstance(verdict, Certificate), str(verdict)
    assert {"batch.old[0]", "batch.advantages[0]"} <= set(verdict.symbolic)


@pytest.mark.parametrize("kind", LIVE)
def test_keeps_whole_step_with_a_live_term(kind: str) -> None:
    torch.manual_seed(0)
    make, step, term = LIVE[kind]
    model = make()
    verdict = prove_step(step, model)
    assert isinstance(verdict, Refusal)
    lines = [reason.where.text for reason in verdict.reasons if reason.where]
    assert any(term in line for line in lines), str(verdict)
    gradients = steps.gradients(step, model, steps.make_batch())
    assert any(gradient.ne(0).any() for gradient in gradients.values())


def test_prunes_frozen_model_with_one_trained_layer() -> None:
    model = decoders.Decoder(tied=False).requires_grad_(False)
    model.head.requires_grad_(True)
    assert isinstance(prove_step(steps.policy_step, model), Certificate)


def test_keeps_trained_layer_behind_a_live_term() -> None:
    model = decoders.Decoder(tied=False).requires_grad_(False)
    model.head.requires_grad_(True)
    assert isinstance(prove_step(steps.step_with_reference, model), Refusal)


def test_leaves_the_model_as_it_was() -> None:
    model = decoders.Decoder(recompute=True, dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    prove_step(steps.policy_step, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
