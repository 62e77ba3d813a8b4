"""A decoder of a real model's shape, proved on tensors without storage."""

from __future__ import annotations

import time

import pytest
import torch

from gradprune import prove
from gradprune.facts import Certificate
from tests.whole import steps, test_hugging_face

transformers = pytest.importorskip("transformers")

QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
def test_proves_decoder_of_36_layers_in_a_minute() -> None:
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3_4B)).train()
    batch = {name: tensor.to("meta") for name, tensor in steps.make_batch(2, 512, QWEN3_4B["vocab_size"]).items()}
    start = time.perf_counter()
    verdict = prove(test_hugging_face.step, (model, batch), zero="advantages * mask", wrt="parameters")
    assert isinstance(verdict, Certificate), str(verdict)
    assert time.perf_counter() - start < 60
