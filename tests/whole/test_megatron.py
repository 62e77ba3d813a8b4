"""Whole-step proofs on megatron-core's GPTModel, in one process on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradprune import prove
from gradprune.facts import Certificate, Refusal
from tests.whole import steps

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from gradprune.megatron.cpu import emulate_cuda

    with ExitStack() as undo:
        undo.enter_context(emulate_cuda())
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        undo.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=1)
        undo.callback(parallel_state.destroy_model_parallel)
        model_parallel_cuda_manual_seed(3)
        yield


def make(**more: Any) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        **more,
    )
    layers = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    ahead = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        layers,
        vocab_size=steps.VOCABULARY,
        max_sequence_length=steps.TOKENS,
        position_embedding_type="learned_absolute",
        mtp_block_spec=ahead,
    ).train()


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "allgather",
}
LIVE = {
    "router balance": {**EXPERTS, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    "router z-loss": {**EXPERTS, "moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.01},
    "two tokens ahead": {"mtp_num_layers": 1},
}


def step(model, batch):
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    rows, width = tokens.shape
    later = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
    positions = torch.arange(width).expand(rows, width)
    logp = -model(tokens, positions, later, labels=labels.contiguous())
    return steps.policy_loss(logp, batch)


def prove_step(model):
    return prove(step, (model, steps.make_batch()), zero="advantages * mask", wrt="parameters")


def test_proves_gpt(one_process: None) -> None:
    model = make()
    verdict = prove_step(model)
    assert isinstance(verdict, Certificate), str(verdict)
    for name, gradient in steps.gradients(step, model, steps.make_batch()).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.parametrize("kind", LIVE)
def test_keeps_gpt_with_a_live_term(one_process: None, kind: str) -> None:
    model = make(**LIVE[kind])
    verdict = prove_step(model)
    assert isinstance(verdict, Refusal)
    lines = [reason.where for reason in verdict.reasons if reason.where]
    assert any("megatron" in line.file for line in lines), str(verdict)
    gradients = steps.gradients(step, model, steps.make_batch())
    assert any(gradient.ne(0).any() for gradient in gradients.values())
