"""Prune TRL's GRPOTrainer: one line before ``trainer.train()``. Runs in under a minute on a CPU; downloads nothing.

    pip install gradprune[trl] && python examples/trl_grpo.py

With a model and a dataset of your own, keep the two lines marked below.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from gradprune.trainers.trl import prune  # <- this line

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
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=3 + len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def begins_with_w1(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Rare at first, so that most groups of completions earn the same reward: zero, for each of them."""
    return [float("w1" in completion.split()[:3]) for completion in completions]


def main() -> float:
    """Train, and return the share of microbatches whose backward was pruned."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=make_model(),
            reward_funcs=begins_with_w1,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=16,
                num_generations=4,
                max_completion_length=8,
                max_steps=6,
                logging_steps=2,
                learning_rate=1e-3,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{(3 * i) % 28}" for i in range(16)]}),
            processing_class=make_tokenizer(),
        )
        step = prune(trainer)  # <- and this one
        trainer.train()
    print(step.explain())
    print(step.report())
    decisions = step.explain().decisions
    return step.explain().dead / len(decisions)


if __name__ == "__main__":
    main()
