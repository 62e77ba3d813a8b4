"""GRPO in plain PyTorch, and one decorator: a tiny policy learns to echo a digit.

Most groups get equal rewards, at first because no sample is right and in the end because all are. Their microbatches
have no gradient, and run without a backward. Run it: ``python examples/decorated_loop.py``
"""

from __future__ import annotations

import torch

import gradprune

DIGITS, LENGTH, GROUP, STEPS = 6, 2, 16, 60


class Policy(torch.nn.Module):
    """Logits of the next token from the prompt, the position and the token before."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.prompt = torch.nn.Embedding(DIGITS, width)
        self.previous = torch.nn.Embedding(DIGITS + 1, width)
        self.position = torch.nn.Parameter(torch.zeros(LENGTH, width))
        self.head = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, DIGITS))

    def forward(self, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """prompts [R], tokens [R, T] -> logits [R, T, digits]; those at t do not see token t."""
        start = torch.full_like(tokens[:, :1], DIGITS)
        previous = torch.cat([start, tokens[:, :-1]], dim=1)
        hidden = self.prompt(prompts)[:, None] + self.previous(previous) + self.position[: tokens.shape[1]]
        return self.head(hidden)


def token_logps(policy: Policy, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(policy(prompts, tokens), dim=-1).gather(-1, tokens[..., None]).squeeze(-1)


@torch.no_grad()
def rollout(policy: Policy) -> list[dict[str, torch.Tensor]]:
    """One microbatch a prompt: a group of samples with their advantages."""
    batches = []
    for digit in range(DIGITS):
        prompts = torch.full((GROUP,), digit)
        tokens = torch.zeros(GROUP, LENGTH, dtype=torch.long)
        for position in range(LENGTH):
            probabilities = policy(prompts, tokens)[:, position].softmax(-1)
            tokens[:, position] = torch.multinomial(probabilities, 1).squeeze(-1)
        rewards = (tokens == digit).all(dim=1).float()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        batches.append(
            {
                "prompts": prompts,
                "tokens": tokens,
                "old_logps": token_logps(policy, prompts, tokens),
                "advantages": advantages[:, None],
                "mask": torch.ones(GROUP, LENGTH),
                "rewards": rewards,
            }
        )
    return batches


@gradprune.grpo_loop(zero="batch['advantages'] * batch['mask']")
def train(policy: Policy, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[float]:
    """Mean reward of each step."""
    history = []
    for _ in range(steps):
        batches = rollout(policy)
        optimizer.zero_grad()
        for batch in batches:
            logps = token_logps(policy, batch["prompts"], batch["tokens"])
            ratio = torch.exp(logps - batch["old_logps"])
            clipped = ratio.clamp(0.8, 1.2)
            token_loss = -torch.min(ratio * batch["advantages"], clipped * batch["advantages"])
            loss = (token_loss * batch["mask"]).sum() / batch["mask"].sum()
            (loss / len(batches)).backward()
        optimizer.step()
        history.append(torch.stack([batch["rewards"].mean() for batch in batches]).mean().item())
    return history


def main() -> tuple[list[float], Policy]:
    """Mean reward of each step, and the trained policy."""
    torch.manual_seed(0)
    policy = Policy()
    return train(policy, torch.optim.AdamW(policy.parameters(), lr=2e-2)), policy


if __name__ == "__main__":
    rewards, _ = main()
    print(f"mean reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} after {len(rewards)} steps")
    print(train.report())
