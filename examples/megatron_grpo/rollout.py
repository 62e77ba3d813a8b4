"""Completions that the model itself samples, their rewards, and GRPO's advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from model import causal_inputs
from task import ANSWER, END, PAD, PROMPT, reward

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rollout:
    """G groups of S answers to one prompt each. tokens [G*S, PROMPT+ANSWER]; rewards and advantages [G*S]; log-probs
    of the answers when they were sampled, and the mask of their tokens, [G*S, ANSWER]."""

    tokens: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    sampled_logps: torch.Tensor
    mask: torch.Tensor
    group_size: int


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: torch.Tensor, group_size: int, generator: torch.Generator) -> Rollout:
    """Sample `group_size` answers to each prompt [G, PROMPT] at temperature 1, until END or ANSWER tokens."""
    tokens = prompts.repeat_interleave(group_size, dim=0)
    done = torch.zeros(len(tokens), dtype=torch.bool)
    logps, mask = [], []
    for _ in range(ANSWER):
        logp = model(tokens, *causal_inputs(tokens))[:, -1].float().log_softmax(dim=-1)
        choice = torch.multinomial(logp.exp(), 1, generator=generator)
        logps.append(logp.gather(1, choice).squeeze(1))
        mask.append(~done)
        tokens = torch.cat([tokens, choice.masked_fill(done[:, None], PAD)], dim=1)
        done = done | (choice.squeeze(1) == END)
    rewards = reward(tokens[:, :PROMPT], tokens[:, PROMPT:])
    return Rollout(
        tokens=tokens,
        rewards=rewards,
        advantages=group_advantages(rewards, group_size),
        sampled_logps=torch.stack(logps, dim=1),
        mask=torch.stack(mask, dim=1).float(),
        group_size=group_size,
    )


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Reward minus the group's mean, over its standard deviation: exactly zero where all rewards are equal."""
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def microbatches(rollout: Rollout) -> list[Batch]:
    """One microbatch a group, cut to its longest answer. Keys as `grpo.forward_step` reads them, all [S, T] but
    advantages [S]."""
    batches = []
    for start in range(0, len(rollout.tokens), rollout.group_size):
        rows = slice(start, start + rollout.group_size)
        width = PROMPT - 1 + int(rollout.mask[rows].sum(dim=1).max())
        before_answer = (rollout.group_size, PROMPT - 1)
        batches.append(
            {
                "tokens": rollout.tokens[rows, :width],
                "labels": rollout.tokens[rows, 1 : width + 1],
                "advantages": rollout.advantages[rows],
                "old_logps": torch.cat([torch.zeros(before_answer), rollout.sampled_logps[rows]], dim=1)[:, :width],
                "loss_mask": torch.cat([torch.zeros(before_answer), rollout.mask[rows]], dim=1)[:, :width],
            }
        )
    return batches
