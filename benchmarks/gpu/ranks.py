"""Question 5: several GPUs under Megatron-Core, Qwen3-4B's layers, 60 % of the tokens dead by whole groups.

    torchrun --nproc-per-node 2 benchmarks/gpu/ranks.py --tensor 1 --pipeline 1 --out ranks.json

Arms, interleaved: ``tokens``, unpruned, token-balanced packing (Karmarkar-Karp on tokens); ``tokens pruned``, the same
packing; ``planned unpruned`` and ``planned``, gradprune's plan; ``dropped``, the live sequences alone. Lengths and
rewards are synthetic, of the shape of real rollouts; a pack runs as one sequence, which makes its attention dearer than
packed attention is. The time of a step is that of the slowest rank; a rank is busy until its last backward ends, where
it begins to wait for the others. The optimizer is not stepped. Then the gradients of the two planned arms are compared
with torch.equal.

    limit = dead tokens / all tokens * (1 - forward-only time / unpruned time), of the token-balanced packing
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

import numpy as np
import torch
import torch.distributed as dist
from pipelines import bubble
from qwen import HAS_GPU, TINY, Shape, forward_step, make_batches, megatron_model, run_megatron, start_megatron

import gradprune
from gradprune.megatron import attach
from gradprune.megatron.cpu import emulate_cuda

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))
from peers import differencing_on_tokens
from rollouts import Rollout, qwen3_4b_forward, sample_rollout

ZERO = "advantages * loss_mask"
PEAK = 989e12
"""Dense bf16 FLOP/s of an H200, by its data sheet."""
PRUNED = ("tokens pruned", "planned")
Packs = list[list[int]]
DEVICE = "cuda" if HAS_GPU else "cpu"


def typical_rollout(sequences: int, dead: float) -> Rollout:
    """Of a hundred rollouts in groups of 8, the one whose share of dead tokens is nearest to `dead`."""
    rollouts = (sample_rollout(sequences, 8, dead, seed) for seed in range(100))
    return min(rollouts, key=lambda r: abs(float(r.lengths[r.dead].sum() / r.lengths.sum()) - dead))


def token_packs(lengths: np.ndarray, budget: int, ranks: int) -> list[Packs]:
    """Rank -> microbatches -> sequences, balanced on tokens, equal counts."""
    pack_of, rank_of = differencing_on_tokens(lengths, qwen3_4b_forward(lengths), budget, ranks)
    packs: list[Packs] = [[] for _ in range(ranks)]
    for pack, rank in enumerate(rank_of):
        packs[rank].append([int(i) for i in (pack_of == pack).nonzero()[0]])
    return packs


def data_of(packs: Packs, rollout: Any, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """One batch a pack: a row of all its tokens, with an advantage for the whole."""
    batches = []
    for pack in packs:
        tokens = max(2, int(sum(rollout.lengths[i] for i in pack)))
        dead = {0} if all(rollout.advantages[i] == 0 for i in pack) else set()
        batches += make_batches(1, tokens, dead, vocabulary, DEVICE)
    return batches


def plan_of(batches: list[dict[str, torch.Tensor]]) -> gradprune.StepPlan:
    return gradprune.StepPlan.from_rollout(torch.cat([b["advantages"] for b in batches]).cpu(), None, 1)


class Ranks:
    """One rank's model and its data under each packing; all methods are called on every rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.core import parallel_state

        self.ranks, rank = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
        )
        self.shape = TINY if args.tiny else Shape(layers=args.layers)
        self.model, self.config = megatron_model(
            self.shape,
            torch.float32 if args.tiny else torch.bfloat16,
            recompute=args.recompute,
            ddp={"overlap_grad_reduce": True, "use_distributed_optimizer": args.distributed_optimizer},
            variable_seq_lengths=args.pipeline > 1,
            moe_token_dispatcher_type="alltoall",
        )
        self._finished = Clock.watching(self.config)
        self.rollout = typical_rollout(args.sequences, args.dead)
        live = np.flatnonzero(self.rollout.advantages != 0)
        planned = gradprune.StepPlan.build(
            self.rollout.lengths,
            self.rollout.advantages,
            token_budget=args.budget,
            ranks=self.ranks,
            cost=qwen3_4b_forward,
            lockstep=True,
        )
        dropped = token_packs(self.rollout.lengths[live], args.budget, self.ranks)[rank]
        packs = {
            "tokens": token_packs(self.rollout.lengths, args.budget, self.ranks)[rank],
            "planned": [list(item.samples) for item in planned.ranks[rank]],
            "dropped": [[int(live[i]) for i in pack] for pack in dropped],
        }
        self.data = {name: data_of(mine, self.rollout, self.shape.vocabulary) for name, mine in packs.items()}
        self.step = gradprune.compile(forward_step, zero=ZERO, schedule=attach(self.model, self.config))

    def run(self, batches: list[Any], pruned: bool, forward_only: bool = False) -> None:
        if pruned:
            bound = self.step.agree(plan_of(batches)).bind(batches)
            run_megatron(self.step, bound, len(batches), self.model)
        else:
            run_megatron(forward_step, batches, len(batches), self.model, forward_only=forward_only)

    def arms(self) -> dict[str, Any]:
        return {
            "tokens": lambda: self.run(self.data["tokens"], False),
            "tokens pruned": lambda: self.run(self.data["tokens"], True),
            "planned unpruned": lambda: self.run(self.data["planned"], False),
            "planned": lambda: self.run(self.data["planned"], True),
            "dropped": lambda: self.run(self.data["dropped"], False),
            "forward only": lambda: self.run(self.data["tokens"], False, forward_only=True),
        }

    def timed(self, call: Any) -> tuple[float, list[float]]:
        """Seconds of the slowest rank, and by rank the seconds until its last backward had ended."""
        dist.barrier()
        self._finished.start()
        call()
        whole, busy = self._finished.stop()
        found = torch.tensor([whole, busy], dtype=torch.float64, device=DEVICE)
        gathered = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, found)
        rows = torch.stack(gathered).tolist()
        return max(row[0] for row in rows), [row[1] for row in rows]

    def peak_memory(self, call: Any) -> int:
        """Bytes allocated at most on this rank while `call` runs."""
        if not HAS_GPU:
            return 0
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def flops(self, call: Any) -> dict[str, float]:
        """FLOPs of all ranks while a pruned `call` runs: executed ones, and those that one would claim."""
        before = self.step.report()
        call()
        after = self.step.report()
        executed = after.model_flops - before.model_flops
        claimed = after.claimed_model_flops - before.claimed_model_flops
        found = torch.tensor([executed, claimed], dtype=torch.float64, device=DEVICE)
        dist.all_reduce(found)
        return dict(zip(("executed", "claimed"), found.tolist()))

    def bit_equal(self) -> bool:
        """Whether pruning changes no gradient, with deterministic algorithms, on any rank."""
        torch.use_deterministic_algorithms(True)
        arms = self.arms()
        arms["planned unpruned"]()
        expected = [parameter.main_grad.clone() for parameter in self.model.parameters()]
        arms["planned"]()
        different = sum(
            not torch.equal(one, parameter.main_grad) for one, parameter in zip(expected, self.model.parameters())
        )
        total = torch.tensor(different, device=DEVICE)
        dist.all_reduce(total)
        torch.use_deterministic_algorithms(False)
        return not int(total)


class Clock:
    """Time from `start` to when this rank has finished its last backward, and to when it has finished all."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    @classmethod
    def watching(cls, config: Any) -> Clock:
        """Notes when ``finalize_model_grads_func`` is called, on the device's own time."""
        clock, finalize = cls(), config.finalize_model_grads_func

        def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
            clock._note()
            return finalize(*args, **kwargs)

        config.finalize_model_grads_func = finalize_model_grads
        return clock

    def start(self) -> None:
        self._synchronize()
        self._events.clear()
        self._note()

    def stop(self) -> tuple[float, float]:
        """Seconds until all has ended, and until the last backward had."""
        self._note()
        self._synchronize()
        first, busy, last = self._events[0], self._events[1], self._events[-1]
        if HAS_GPU:
            return first.elapsed_time(last) / 1e3, first.elapsed_time(busy) / 1e3
        return last - first, busy - first

    def _note(self) -> None:
        if not HAS_GPU:
            self._events.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def _synchronize(self) -> None:
        if HAS_GPU:
            torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    ranks = Ranks(args)
    arms = ranks.arms()
    for name in (*arms, *PRUNED):  # the pruned ones learn the order of reductions, and then prove
        arms[name]()
    runs: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in arms}
    for _ in range(args.repeats):
        for name, call in arms.items():
            runs[name].append(ranks.timed(call))
    seconds = {name: median(whole for whole, _ in found) for name, found in runs.items()}
    lengths, live = ranks.rollout.lengths, ranks.rollout.advantages != 0
    dead_share = 1 - float(lengths[live].sum() / lengths.sum())
    result = {
        "layout": f"tensor {args.tensor}, pipeline {args.pipeline}, data {ranks.ranks}",
        "distributed_optimizer": args.distributed_optimizer,
        "recompute": args.recompute,
        "layers": ranks.shape.layers,
        "sequences": args.sequences,
        "budget": args.budget,
        "repeats": args.repeats,
        "device": torch.cuda.get_device_name() if HAS_GPU else "cpu",
        "torch": torch.__version__,
        "dead_tokens": dead_share,
        "microbatches": {name: len(batches) for name, batches in ranks.data.items()},
        "step_ms": {name: 1e3 * value for name, value in seconds.items()},
        "busy_ms": {
            name: [1e3 * median(column) for column in zip(*(b for _, b in found))] for name, found in runs.items()
        },
        "limit": dead_share * (1 - seconds["forward only"] / seconds["tokens"]),
        "saved": {name: 1 - seconds[name] / seconds["tokens"] for name in ("tokens pruned", "planned", "dropped")},
        "peak_bytes": {name: ranks.peak_memory(call) for name, call in arms.items()},
    }
    flops = ranks.flops(arms["planned"])
    capacity = PEAK * dist.get_world_size() * seconds["planned"]
    result |= {"mfu": flops["executed"] / capacity, "mfu_claimed": flops["claimed"] / capacity}
    result["executed_tflops"] = flops["executed"] / seconds["planned"] / 1e12
    if args.pipeline > 1:
        result["bubble"] = bubble(ranks, args.pipeline, 64 if args.tiny else 4096)
    return result | {"bit_equal": ranks.bit_equal(), "dead_microbatches_of_this_rank": ranks.step.explain().dead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=64, help="of all data-parallel ranks together")
    parser.add_argument("--dead", type=float, default=0.6, help="share of the groups that have no advantage")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--recompute", action="store_true")
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


if __name__ == "__main__":
    main()
