"""GRPO in plain PyTorch with a compiled step and a plan: the loop of ``decorated_loop.py``, written for gradprune.

The step is a function of its own, and the plan says ahead of each update which microbatches are dead: so it can be
printed, compared between ranks, and made where the advantages are. Run it: ``python examples/plain_loop.py``
"""

from __future__ import annotations

import torch
from decorated_loop import STEPS, Policy, rollout, token_logps

import gradprune


def step(policy: Policy, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of one microbatch."""
    logps = token_logps(policy, batch["prompts"], batch["tokens"])
    ratio = torch.exp(logps - batch["old_logps"])
    clipped = ratio.clamp(0.8, 1.2)
    token_loss = -torch.min(ratio * batch["advantages"], clipped * batch["advantages"])
    return (token_loss * batch["mask"]).sum() / batch["mask"].sum()


def make_plan(batches: list[dict[str, torch.Tensor]]) -> gradprune.StepPlan:
    advantages = torch.cat([batch["advantages"] for batch in batches])
    mask = torch.cat([batch["mask"] for batch in batches])
    return gradprune.StepPlan.from_rollout(advantages, mask, [len(batch["mask"]) for batch in batches])


def main(prune: bool = True) -> tuple[list[float], Policy, gradprune.FlopReport]:
    """Mean reward of each step, the trained policy, and an account of the work."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2)
    pruned_step = gradprune.compile(step, zero="advantages * mask")
    run = pruned_step if prune else step
    history = []
    for update in range(STEPS):
        batches = rollout(policy)
        plan = make_plan(batches)
        if update == 0:
            print(plan)
        optimizer.zero_grad()
        for batch in plan.bind(batches) if prune else batches:
            loss = run(policy, batch)
            (loss / len(batches)).backward()
        optimizer.step()
        history.append(torch.stack([batch["rewards"].mean() for batch in batches]).mean().item())
    return history, policy, pruned_step.report()


if __name__ == "__main__":
    rewards, _, report = main()
    print(f"mean reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} after {len(rewards)} steps")
    print(report)
