"""A tiny real model and a real GRPOTrainer on a CPU, nothing of it downloaded."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

WORDS = [f"w{i}" for i in range(28)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=3 + len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attention_dropout=0.1,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def reward_where_it_matters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Half of the prompts are solved by anything: their groups have equal rewards, and no advantage."""
    return [
        1.0 if int(prompt.split()[0][1:]) % 2 else float(sum(word in ("w1", "w2", "w3", "w4") for word in text.split()))
        for prompt, text in zip(prompts, completions)
    ]


def make_trainer(folder: str, **options: Any) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 3,
        "use_cpu": True,
        "disable_tqdm": True,
        "activation_checkpointing": False,
        "bf16": False,
    }
    source: Any = make_model()
    if "beta" in options:  # TRL loads the reference model from where the policy came from
        source.save_pretrained(f"{folder}/model")
        source = f"{folder}/model"
    peft_config = options.pop("peft_config", None)
    prompts = [f"w{i} w{(3 * i) % 28}" for i in range(16)]
    return GRPOTrainer(
        model=source,
        args=GRPOConfig(output_dir=folder, **{**settings, **options}),
        reward_funcs=reward_where_it_matters,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )
