"""Question 5: several GPUs under Megatron-Core, Qwen3-4B's layers, 60 % of the tokens dead by whole groups.

    torchrun --nproc-per-node 2 benchmarks/gpu/ranks.py --tensor 1 --pipeline 1 --out ranks.json

Arms, interleaved: ``tokens``, unpruned, token-balanced packing (Karmarkar-Karp on tokens); ``tokens pruned``, the same
packing; ``planned unpruned`` and ``planned``, gradprune's plan. Lengths and rewards are synthetic, of the shape of real
rollouts; a pack runs as one sequence, which makes its attention dearer than packed attention is. The time of a step is
that of the slowest rank. Then the gradients of the two planned arms are compared with torch.equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from qwen import HAS_GPU, TINY, Shape, forward_step, make_batches, megatron_model, run_megatron, start_megatron

import gradprune
from gradprune.megatron import attach
from gradprune.megatron.cpu import emulate_cuda

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))
from peers import differencing_on_tokens
from rollouts import qwen3_4b_forward, sample_rollout

ZERO = "advantages * loss_mask"


def token_packs(rollout: Any, budget: int, ranks: int) -> list[list[list[int]]]:
    """Rank -> microbatches -> sequences, balanced on tokens, equal counts."""
    pack_of, rank_of = differencing_on_tokens(rollout.lengths, qwen3_4b_forward(rollout.lengths), budget, ranks)
    packs: list[list[list[int]]] = [[] for _ in range(ranks)]
    for pack, rank in enumerate(rank_of):
        packs[rank].append([int(i) for i in (pack_of == pack).nonzero()[0]])
    return packs


def data_of(packs: list[list[int]], rollout: Any, vocabulary: int, device: str) -> list[dict[str, torch.Tensor]]:
    """One batch a pack: a row of all its tokens, with an advantage for the whole."""
    batches = []
    for pack in packs:
        tokens = max(2, int(sum(rollout.lengths[i] for i in pack)))
        dead = {0} if all(rollout.advantages[i] == 0 for i in pack) else set()
        batches += make_batches(1, tokens, dead, vocabulary, device)
    return batches


def plan_of(batches: list[dict[str, torch.Tensor]]) -> gradprune.StepPlan:
    return gradprune.StepPlan.from_rollout(torch.cat([b["advantages"] for b in batches]).cpu(), None, 1)


def timed(call: Any) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    seconds = torch.tensor(time.perf_counter() - start, device="cuda" if HAS_GPU else "cpu")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=64, help="of all data-parallel ranks together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs and gloo, to test this script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with nullcontext() if HAS_GPU else emulate_cuda():
        start_megatron(args.tensor, args.pipeline)
        result = measure(args)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from megatron.core import parallel_state

    device = "cuda" if HAS_GPU else "cpu"
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    shape = TINY if args.tiny else Shape(layers=args.layers)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    ddp = {"overlap_grad_reduce": True, "use_distributed_optimizer": args.distributed_optimizer}
    model, config = megatron_model(
        shape,
        dtype,
        recompute=False,
        ddp=ddp,
        variable_seq_lengths=args.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
    )
    rollout = sample_rollout(args.sequences, 8, 0.6)
    packs = token_packs(rollout, args.budget, ranks)[rank]
    count = max(len(mine) for mine in token_packs(rollout, args.budget, ranks))
    assert len(packs) == count, "Karmarkar-Karp gives every rank as many packs"
    planned = gradprune.StepPlan.build(
        rollout.lengths, rollout.advantages, token_budget=args.budget, ranks=ranks, cost=qwen3_4b_forward, lockstep=True
    )
    ours = [list(item.samples) for item in planned.ranks[rank]]
    data = {"tokens": data_of(packs, rollout, shape.vocabulary, device)}
    data["planned"] = data_of(ours, rollout, shape.vocabulary, device)
    step = gradprune.compile(forward_step, zero=ZERO, schedule=attach(model, config))

    def run(kind: str, pruned: bool) -> None:
        batches = data[kind]
        if pruned:
            run_megatron(step, step.agree(plan_of(batches)).bind(batches), len(batches), model)
        else:
            run_megatron(forward_step, batches, len(batches), model)

    arms = {
        "tokens": lambda: run("tokens", False),
        "tokens pruned": lambda: run("tokens", True),
        "planned unpruned": lambda: run("planned", False),
        "planned": lambda: run("planned", True),
    }
    for _ in range(2):
        for call in arms.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(args.repeats):
        for name, call in arms.items():
            times[name].append(timed(call))
    torch.use_deterministic_algorithms(True)
    arms["planned unpruned"]()
    expected = [parameter.main_grad.clone() for parameter in model.parameters()]
    arms["planned"]()
    equal = all(torch.equal(a, parameter.main_grad) for a, parameter in zip(expected, model.parameters()))
    dead_tokens = sum(int(n) for n, a in zip(rollout.lengths, rollout.advantages) if a == 0)
    return {
        "layout": f"tensor {args.tensor}, pipeline {args.pipeline}, data {ranks}",
        "distributed_optimizer": args.distributed_optimizer,
        "layers": shape.layers,
        "microbatches": {name: len(batches) for name, batches in data.items()},
        "dead_tokens": dead_tokens / int(rollout.lengths.sum()),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "step_ms": {name: 1e3 * median(values) for name, values in times.items()},
        "dead_microbatches_of_this_rank": step.explain().dead,
        "bit_equal": equal,
    }


if __name__ == "__main__":
    main()
