"""Planners against each other on the same rollouts: results.json, and with --pictures timelines in out/.

python benchmarks/planner/run.py            # all, a few minutes
python benchmarks/planner/run.py --quick    # 8 and 64 ranks
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from ours import BUDGET, as_arrays, build
from peers import PEERS
from rollouts import Rollout, qwen3_4b_forward, sample_rollout
from yardstick import DEAD, LIVE, bound, score

HERE = Path(__file__).parent
OURS = {"gradprune": {}, "gradprune, lockstep": {"lockstep": True}}


def compare(rollout: Rollout, ranks: int) -> dict[str, dict[str, float]]:
    flops = qwen3_4b_forward(rollout.lengths)
    rows = {}
    for name in [*PEERS, *OURS]:
        start = time.perf_counter()
        if name in PEERS:
            plan = PEERS[name](rollout.lengths, flops, BUDGET, ranks)
        else:
            built = build(rollout, ranks, **OURS[name])
        seconds = time.perf_counter() - start
        if name in OURS:
            plan = as_arrays(built, len(rollout.lengths))
        rows[name] = asdict(score(rollout.lengths, rollout.dead, flops, ranks, *plan)) | {"seconds": seconds}
    return rows


def small_batches() -> list[dict[str, float]]:
    """How near the slowest rank is to the bound where sequences are few, worst of the seeds."""
    rows = []
    for per_rank in (8, 16, 32, 64, 256):
        for ranks in (8, 64, 256):
            ratios = []
            for dead_share in (0.3, 0.6, 0.9):
                for seed in range(5):
                    rollout = sample_rollout(per_rank * ranks, 8, dead_share, seed)
                    balance = build(rollout, ranks).balance
                    assert balance is not None
                    ratios.append(balance.slowest / balance.bound)
            rows.append({"per_rank": per_rank, "ranks": ranks, "worst": max(ratios), "mean": float(np.mean(ratios))})
    return rows


def lockstep_waiting() -> list[dict[str, float]]:
    """Time of a step in lockstep over its own bound, where all dead work is pruned: live and dead each level alone."""
    rows = []
    for ranks in (8, 64, 256, 1024):
        for dead_share in (0.3, 0.6, 0.9):
            rollout = sample_rollout(64 * ranks, 8, dead_share)
            flops = qwen3_4b_forward(rollout.lengths)
            best = LIVE * bound(flops[~rollout.dead], ranks) + DEAD * bound(flops[rollout.dead], ranks)
            balance = build(rollout, ranks, lockstep=True).balance
            assert balance is not None
            rows.append({"ranks": ranks, "dead_share": dead_share, "waiting": balance.waiting / best})
    return rows


def fixed_size() -> list[dict[str, float]]:
    """Share of dead tokens that stand in dead microbatches of eight sequences."""
    rows = []
    for group_size in (8, 16):
        for dead_share in (0.3, 0.6, 0.9):
            rollout = sample_rollout(64 * 64, group_size, dead_share)
            plan = build(rollout, 64, token_budget=None, microbatch_size=8)
            flops = qwen3_4b_forward(rollout.lengths)
            scored = score(rollout.lengths, rollout.dead, flops, 64, *as_arrays(plan, len(rollout.lengths)))
            rows.append({"group_size": group_size, "dead_share": dead_share, "found": scored.found})
    return rows


def million() -> list[dict[str, object]]:
    """1,000,000 sequences for 1024 ranks: the least of three, wall and CPU seconds of this process."""
    rollout = sample_rollout(1_000_000, 8, 0.6)
    rows: list[dict[str, object]] = []
    for name, limits in OURS.items():
        taken = []
        for _ in range(3):
            wall, cpu = time.perf_counter(), time.process_time()
            plan = build(rollout, 1024, **limits)
            taken.append((time.perf_counter() - wall, time.process_time() - cpu))
        assert plan.balance is not None
        wall, cpu = (min(seconds) for seconds in zip(*taken))
        ratio = plan.balance.slowest / plan.balance.bound
        rows.append({"planner": name, "wall": wall, "cpu": cpu, "digest": plan.digest(), "slowest": ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 and 64 ranks, no million")
    parser.add_argument("--pictures", action="store_true", help="timelines of 8 ranks to out/ (needs matplotlib)")
    parser.add_argument("--million", action="store_true", help="only time the million again, into results.json")
    options = parser.parse_args()
    if options.pictures:
        from timelines import draw_timelines

        print(f"wrote {draw_timelines(HERE.parents[1] / 'out')}")
        return
    if options.million:
        path = HERE / "results.json"
        results = json.loads(path.read_text()) | {"million": million()}
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results["million"], indent=1))
        return
    cases = []
    for ranks in (8, 64) if options.quick else (8, 64, 256, 1024):
        for group_size in (8, 16):
            for dead_share in (0.3, 0.6, 0.9):
                rollout = sample_rollout(64 * ranks, group_size, dead_share)
                case = {"ranks": ranks, "group_size": group_size, "dead_share": dead_share}
                case["dead_tokens"] = float(rollout.lengths[rollout.dead].sum() / rollout.lengths.sum())
                cases.append(case | {"planners": compare(rollout, ranks)})
                print(json.dumps(case), flush=True)
    results = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}",
        "budget": BUDGET, "per_rank": 64, "cases": cases, "small": small_batches(), "fixed_size": fixed_size(),
        "lockstep": lockstep_waiting(), "million": [] if options.quick else million(),
    }  # fmt: skip
    name = "results_quick.json" if options.quick else "results.json"
    (HERE / name).write_text(json.dumps(results, indent=1, default=float) + "\n")
    print(markdown(results))


def markdown(results: dict) -> str:
    """The tables of the README, from groups of 8: saved, found with slowest over bound, saved in lockstep."""
    names = [*PEERS, *OURS]
    cells = (
        ("possible | ", lambda row: f"{row['possible']:.1%} | ", lambda row: f"{row['saved']:.1%}"),
        ("", lambda row: "", lambda row: f"{row['found']:.0%}, {row['slowest']:.3f}"),
        ("", lambda row: "", lambda row: f"{row['lockstep']:.1%}"),
    )
    tables = []
    for title, extra, cell in cells:
        lines = [f"| ranks | dead groups | {title}{' | '.join(names)} |"]
        lines.append("|---" * (2 + bool(title) + len(names)) + "|")
        for case in results["cases"]:
            if case["group_size"] == 8:
                rows = case["planners"]
                line = f"| {case['ranks']} | {case['dead_share']:.0%} | {extra(rows['gradprune'])}"
                lines.append(line + " | ".join(cell(rows[name]) for name in names) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


if __name__ == "__main__":
    main()
