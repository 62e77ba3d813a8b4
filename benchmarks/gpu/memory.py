"""Question 4: what a dead microbatch holds in memory, and what longer dead packs save.

    python benchmarks/gpu/memory.py --out memory.json

Peaks are of one microbatch, above what the model and its gradients take. Then a step with 60 % of its tokens dead, the
dead ones in packs of 1, 2 and 3 times the live length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from qwen import Shape, make_batches
from saving import ZERO, HuggingFace, Megatron, synchronize, timed

import gradprune


def peak(call: Any) -> int:
    """Bytes allocated at most while `call` runs, above what was allocated before."""
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def one(trainer: Any, step: Any, tokens: int, dead: bool, vocabulary: int, device: str) -> Any:
    """A call that runs one microbatch of `tokens` tokens under its plan."""
    batches = make_batches(1, tokens, {0} if dead else set(), vocabulary, device)
    advantages = torch.zeros(1) if dead else torch.ones(1)
    plan = gradprune.StepPlan.from_rollout(advantages, None, 1)
    return lambda: trainer.run(step, plan.bind(batches), 1)


def packs(trainer: Any, step: Any, tokens: int, times: int, vocabulary: int, device: str) -> Any:
    """A step of 4 live microbatches and 6 dead ones' worth of tokens, in packs `times` as long."""
    live = make_batches(4, tokens, set(), vocabulary, device)
    dead = make_batches(6 // times, tokens * times, set(range(6 // times)), vocabulary, device)
    advantages = torch.cat([torch.zeros(len(dead)), torch.ones(len(live))])
    plan = gradprune.StepPlan.from_rollout(advantages, None, 1)
    return lambda: trainer.run(step, plan.bind([*dead, *live]), len(dead) + len(live))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["megatron", "hugging_face"], default="megatron")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape, device = Shape(layers=args.layers), "cuda"
    kind = Megatron if args.model == "megatron" else HuggingFace
    trainer = kind(shape, torch.bfloat16, args.recompute, device)
    step = gradprune.compile(trainer.step, zero=ZERO)
    for times in (1, 2):
        one(trainer, step, args.tokens * times, True, shape.vocabulary, device)()  # proves; other sizes
    live = peak(one(trainer, step, args.tokens, False, shape.vocabulary, device))
    dead = {}
    for times in (1, 2, 3, 4):
        call = one(trainer, step, args.tokens * times, True, shape.vocabulary, device)
        call()
        dead[times] = peak(call)
    seconds = {times: [] for times in (1, 2, 3)}
    for _ in range(3):
        for times in seconds:
            call = packs(trainer, step, args.tokens, times, shape.vocabulary, device)
            seconds[times].append(timed(call))
    slope = (dead[4] - dead[1]) / 3
    result = {
        "model": args.model,
        "layers": args.layers,
        "tokens": args.tokens,
        "recompute": args.recompute,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "live_peak": live,
        "dead_peak": dead,
        "dead_tokens_in_the_memory_of_a_live_microbatch": int(args.tokens * (1 + (live - dead[1]) / slope)),
        "step_seconds_by_dead_pack": {times: median(values) for times, values in seconds.items()},
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
