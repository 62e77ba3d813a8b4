"""Steps to prove whole, and the batch that they take: model and data in, loss out."""

from __future__ import annotations

from typing import Any

import torch

ROWS, TOKENS, VOCABULARY = 3, 7, 19
Batch = dict[str, torch.Tensor]


def make_batch(rows: int = ROWS, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> Batch:
    """``tokens`` [R, T + 1] and, for the T predicted ones, ``old``, ``advantages`` and ``mask`` [R, T].

    Advantages are zero at valid tokens only: the product with the mask is zero everywhere.
    """
    gen = torch.Generator().manual_seed(5)
    mask = (torch.rand(rows, tokens, generator=gen) > 0.3).float()
    return {
        "tokens": torch.randint(0, vocabulary, (rows, tokens + 1), generator=gen),
        "old": -torch.rand(rows, tokens, generator=gen) * 3,
        "advantages": torch.randn(rows, tokens, generator=gen) * (1 - mask),
        "mask": mask,
    }


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of the next token: ``[R, T]`` from logits ``[R, T, V]`` and tokens ``[R, T + 1]``."""
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def policy_loss(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    ratio = torch.exp(logp - batch["old"])
    gain = batch["advantages"]
    policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.28) * gain)
    return (policy * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def policy_step(model: Any, batch: Batch) -> torch.Tensor:
    """A model that gives logits, or an object that has them."""
    output = model(batch["tokens"][:, :-1])
    return policy_loss(log_probabilities(getattr(output, "logits", output), batch["tokens"]), batch)


def gradients(step: Any, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """What the step leaves in each parameter that requires grad; zeros where it leaves nothing."""
    model.zero_grad(set_to_none=True)
    loss = step(model, batch)
    loss.backward()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in trained.items()}


def step_with_router_penalty(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    loss = policy_loss(log_probabilities(logits, batch["tokens"]), batch)
    return loss + 0.01 * model.mixture.extra


def step_two_tokens_ahead(model: Any, batch: Batch) -> torch.Tensor:
    logits, ahead = model(batch["tokens"][:, :-1])
    further = torch.nn.functional.cross_entropy(ahead[:, :-1].flatten(0, 1), batch["tokens"][:, 2:].flatten())
    return policy_loss(log_probabilities(logits, batch["tokens"]), batch) + 0.1 * further


def step_with_value(model: Any, batch: Batch) -> torch.Tensor:
    logits, value = model(batch["tokens"][:, :-1])
    critic = ((value - batch["advantages"]) ** 2 * batch["mask"]).mean()
    return policy_loss(log_probabilities(logits, batch["tokens"]), batch) + 0.5 * critic


def step_with_reference(model: Any, batch: Batch) -> torch.Tensor:
    logp = log_probabilities(model(batch["tokens"][:, :-1]), batch["tokens"])
    divergence = (batch["old"] - logp).exp() - (batch["old"] - logp) - 1
    return policy_loss(logp, batch) + 0.001 * (divergence * batch["mask"]).mean()


def step_with_decay_in_the_loss(model: Any, batch: Batch) -> torch.Tensor:
    loss = policy_step(model, batch)
    return loss + 1e-4 * sum(value.square().sum() for value in model.parameters())
