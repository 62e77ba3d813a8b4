"""The demo's run: warm-up, updates in two arms, and what is shown of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import compare
import grpo
import model
import report
import rollout
import task
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from rich.console import Console
from rich.progress import Progress

import gradprune

SEED = 1
WARM_UP, WARM_UP_ROWS, WARM_UP_RATE = 160, 48, 1e-3
UPDATES, GROUPS, GROUP_SIZE, RATE = 24, 32, 8, 2e-4
HIDDEN, LAYERS = 384, 2
OUT = Path("out")


@dataclass
class Demo:
    """The objects of the run, and what is known so far."""

    console: Console
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    pruned_step: Any
    generator: torch.Generator
    updates: list[report.Update] = field(default_factory=list)
    compared: int = 0


def run() -> int:
    """The whole demo; 0, or 1 where the arms differ."""
    model.start_megatron(SEED)
    try:
        return train(Console())
    finally:
        model.stop_megatron()


def train(console: Console) -> int:
    gpt, _ = model.build_model(HIDDEN, LAYERS)
    optimizer = model.build_optimizer(gpt, WARM_UP_RATE)
    pruned_step = gradprune.compile(grpo.forward_step, zero="advantages * loss_mask")
    demo = Demo(console, gpt, optimizer, pruned_step, torch.Generator().manual_seed(SEED))
    with Progress(console=console) as progress:
        warm_up(demo, progress)
        bar = progress.add_task("GRPO, both arms", total=UPDATES)
        for number in range(UPDATES):
            unequal = update(demo, pruned_first=number % 2 == 1)
            if unequal:
                console.print(f"[red]update {number + 1} is not bit-equal: {len(unequal)} differ, first {unequal[0]}")
                return 1
            progress.update(bar, advance=1, description=f"GRPO, reward {demo.updates[-1].reward:.2f}")
    flops = pruned_step.report()
    verdicts = [str(verdict) for verdict in pruned_step.explain().verdicts]
    console.print(*verdicts, sep="\n", markup=False, highlight=False, soft_wrap=True)
    report.show_updates(console, demo.updates)
    report.show_totals(console, demo.updates, flops, demo.compared)
    OUT.mkdir(exist_ok=True)
    report.write_record(OUT / "megatron_grpo.json", demo.updates, flops, verdicts)
    report.draw_picture(OUT / "megatron_grpo.png", demo.updates)
    console.print(f"wrote {OUT / 'megatron_grpo.json'} and {OUT / 'megatron_grpo.png'}")
    return 0


def warm_up(demo: Demo, progress: Progress) -> None:
    """Imitate right answers until short prompts are easy and long ones are still out of reach."""
    for number in progress.track(range(WARM_UP), description="supervised warm-up"):
        model.set_learning_rate(demo.optimizer, WARM_UP_RATE * min(1, (number + 1) / 20) * (1 - 0.9 * number / WARM_UP))
        batch = grpo.imitation_batch(WARM_UP_ROWS, demo.generator)
        grpo.run_schedule(grpo.imitation_step, iter([batch]), 1, demo.model, demo.optimizer)
        demo.optimizer.step()
    model.set_learning_rate(demo.optimizer, RATE)


def update(demo: Demo, pruned_first: bool) -> list[str]:
    """Sample a rollout and update on it in both arms. Returns the names of what differs, and keeps the record."""
    sampled = rollout.sample(demo.model, task.make_prompts(GROUPS, demo.generator), GROUP_SIZE, demo.generator)
    batches = rollout.microbatches(sampled)
    plan = gradprune.StepPlan.from_rollout(sampled.advantages, sampled.mask, GROUP_SIZE)
    state = compare.read_state(demo.model, demo.optimizer)
    before = compare.copy_state(state)
    arms = {}
    for pruned in (pruned_first, not pruned_first):
        compare.restore_state(state, before)
        step, data = (demo.pruned_step, plan.bind(batches)) if pruned else (grpo.forward_step, iter(batches))
        arms[pruned] = compare.run_arm(step, data, len(batches), demo.model, demo.optimizer)
    demo.compared += len(arms[True].tensors) + sum(map(len, arms[True].metrics))
    demo.updates.append(summarise(sampled, batches, plan, arms[False].seconds, arms[True].seconds))
    return compare.differences(arms[False], arms[True])


def summarise(
    sampled: rollout.Rollout,
    batches: list[rollout.Batch],
    plan: gradprune.StepPlan,
    unpruned: float,
    pruned: float,
) -> report.Update:
    """What the table shows of one update; unpruned, pruned: seconds."""
    right = sampled.rewards.view(-1, GROUP_SIZE).sum(dim=1)
    tokens = [batch["tokens"].numel() for batch in batches]
    return report.Update(
        reward=float(sampled.rewards.mean()),
        all_right=int((right == GROUP_SIZE).sum()),
        all_wrong=int((right == 0).sum()),
        mixed=int(((right > 0) & (right < GROUP_SIZE)).sum()),
        dead_microbatches=sum(item.dead for item in plan.microbatches),
        dead_tokens=sum(count for count, item in zip(tokens, plan.microbatches, strict=True) if item.dead),
        tokens=sum(tokens),
        seconds_unpruned=unpruned,
        seconds_pruned=pruned,
    )
