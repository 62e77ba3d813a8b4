"""Whole-step proofs on decoders of transformers, real classes with tiny configs."""

from __future__ import annotations

import pytest
import torch

from gradprune import prove
from gradprune.facts import Certificate, Refusal
from tests.whole import decoders, steps

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": steps.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
FAMILIES = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def make(family: str, attention: str = "sdpa") -> torch.nn.Module:
    config, model, more = FAMILIES[family]
    settings = getattr(transformers, config)(**TINY, **more, attn_implementation=attention)
    return getattr(transformers, model)(settings).train()


def step(model, batch):
    output = model(input_ids=batch["tokens"][:, :-1], use_cache=False)
    return steps.policy_loss(steps.log_probabilities(output.logits, batch["tokens"]), batch)


def step_with_router_penalty(model, batch):
    output = model(input_ids=batch["tokens"][:, :-1], use_cache=False, output_router_logits=True)
    loss = steps.policy_loss(steps.log_probabilities(output.logits, batch["tokens"]), batch)
    return loss + 0.001 * output.aux_loss


def prove_step(program, model):
    return prove(program, (model, steps.make_batch()), zero="advantages * mask", wrt="parameters")


def assert_all_zero(program, model) -> None:
    for name, gradient in steps.gradients(program, model, steps.make_batch()).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_proves_decoder(family: str, attention: str) -> None:
    model = make(family, attention)
    verdict = prove_step(step, model)
    assert isinstance(verdict, Certificate), str(verdict)
    assert_all_zero(step, model)


def test_proves_decoder_that_recomputes() -> None:
    model = make("qwen3")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert isinstance(prove_step(step, model), Certificate)
    assert_all_zero(step, model)


def test_proves_low_rank_updates() -> None:
    model = make("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = decoders.LowRank(layer.self_attn.q_proj)
    assert isinstance(prove_step(step, model), Certificate)
    assert_all_zero(step, model)


def test_keeps_entropy_of_the_logits() -> None:
    def program(model, batch):
        output = model(input_ids=batch["tokens"][:, :-1], use_cache=False)
        entropy = -(output.logits.softmax(-1) * output.logits.log_softmax(-1)).sum(-1)
        loss = steps.policy_loss(steps.log_probabilities(output.logits, batch["tokens"]), batch)
        return loss - 0.01 * entropy.mean()

    model = make("qwen3")
    verdict = prove_step(program, model)
    assert isinstance(verdict, Refusal)
    assert any(reason.where and "entropy" in reason.where.text for reason in verdict.reasons), str(verdict)
    assert any(gradient.ne(0).any() for gradient in steps.gradients(program, model, steps.make_batch()).values())


def test_keeps_router_penalty() -> None:
    config = transformers.Qwen3MoeConfig(**TINY, **EXPERTS, router_aux_loss_coef=0.001)
    model = transformers.Qwen3MoeForCausalLM(config).train()
    verdict = prove_step(step_with_router_penalty, model)
    assert isinstance(verdict, Refusal)
    gradients = steps.gradients(step_with_router_penalty, model, steps.make_batch())
    assert any(gradient.ne(0).any() for gradient in gradients.values())
