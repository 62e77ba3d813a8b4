"""Questions 2 and 3: no synchronisation is added, and every gradient is bit-equal on the device.

    python benchmarks/gpu/exactness.py --out exactness.json

Deterministic algorithms are on (the command sets CUBLAS_WORKSPACE_CONFIG itself). Each case runs the same microbatches
unpruned and pruned from the same state and compares every gradient with torch.equal; then it repeats the pruned pass
with ``torch.cuda.set_sync_debug_mode("error")`` and counts synchronising runtime calls of both arms with the profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from qwen import TINY, Shape, make_batches
from saving import ZERO, HuggingFace, Megatron, arms, plan_of, synchronize, timed

import gradprune

SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
DTYPES = ("bfloat16", "float32")
CASES = [
    *((m, dtype, kind) for m in ("megatron", "hugging_face") for dtype in DTYPES for kind in ("eager", "recompute")),
    *(("hugging_face", dtype, "compiled") for dtype in DTYPES),
]


def synchronising_calls(call: Any) -> int:
    """Synchronising runtime calls while `call` runs, those of the profiler itself left out."""
    if not torch.cuda.is_available():
        return 0
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key in SYNCHRONISING)


def without_synchronisation(call: Any) -> str:
    """Run with synchronisations forbidden; the first one as text, or ''."""
    if not torch.cuda.is_available():
        call()
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def check(trainer: Any, shape: Shape, tokens: int, device: str) -> dict[str, Any]:
    dead = {0, 2, 3, 5}
    batches = make_batches(6, tokens, dead, shape.vocabulary, device)
    pruned = gradprune.compile(trainer.step, zero=ZERO)
    calls = arms(trainer, pruned, batches, dead)
    calls["unpruned"]()
    expected = trainer.gradients()
    for _ in range(2):  # observed and proved, then dead from the first microbatch on
        calls["gradprune"]()
        found = trainer.gradients()
        different = [name for name in expected if not torch.equal(expected[name], found[name])]
    pruned.check()
    return {
        "tensors": len(expected),
        "different": different,
        "dead": pruned.explain().dead,
        "sync_errors": [without_synchronisation(calls[name]) for name in ("unpruned", "gradprune")],
        "synchronising_calls": [synchronising_calls(calls[name]) for name in ("unpruned", "gradprune")],
    }


class Clocked:
    """A step that sums up the seconds inside of it."""

    def __init__(self, step: Any) -> None:
        self._step, self.seconds = step, 0.0

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        found = self._step(*args)
        self.seconds += time.perf_counter() - start
        return found


def host_time(device: str) -> dict[str, float]:
    """Microseconds of host time that wrapping adds to a microbatch, on a model that the host bounds.

    live: spent outside of the step, a plan's iterator included, less what a loop spends there without either. dead: the
    difference to a forward under no_grad.
    """
    trainer = HuggingFace(TINY, torch.float32, False, device)
    clocked = Clocked(trainer.step)
    pruned = gradprune.compile(clocked, zero=ZERO)
    count = 50
    live, dead = (make_batches(count, 32, flags, TINY.vocabulary, device) for flags in (set(), set(range(count))))
    plans = plan_of(live, set()), plan_of(dead, set(range(count)))
    arms(trainer, pruned, dead, set(range(count)))["gradprune"]()

    def forwards(step: Any, batches: Any) -> None:
        for batch in batches:
            step(trainer.model, batch)

    def without_graph() -> None:
        with torch.no_grad():
            forwards(clocked, dead)

    whole: dict[str, list[float]] = {}
    outside: dict[str, list[float]] = {}
    for _ in range(15):
        for name, call in {
            "unpruned_live": lambda: forwards(clocked, live),
            "wrapped_live": lambda: forwards(pruned, plans[0].bind(live)),
            "no_grad": without_graph,
            "wrapped_dead": lambda: forwards(pruned, plans[1].bind(dead)),
        }.items():
            clocked.seconds = 0.0
            seconds = timed(call)
            whole.setdefault(name, []).append(1e6 * seconds / count)
            outside.setdefault(name, []).append(1e6 * (seconds - clocked.seconds) / count)
    best = {name: min(times) for name, times in whole.items()}
    return {
        "live": median(outside["wrapped_live"]) - median(outside["unpruned_live"]),
        "dead": best["wrapped_dead"] - best["no_grad"],
        **best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to test this script")
    parser.add_argument("--only", choices=["megatron", "hugging_face"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(True)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "cases": []}
    result["torch"] = torch.__version__
    shape = TINY if args.tiny else Shape(layers=args.layers)
    for model, dtype, kind in CASES:
        if args.only not in (None, model):
            continue
        make = Megatron if model == "megatron" else HuggingFace
        trainer = make(shape, getattr(torch, dtype), kind == "recompute", device)
        if kind == "compiled":
            trainer.model.compile()
        found = check(trainer, shape, args.tokens, device)
        result["cases"].append({"model": model, "dtype": dtype, "kind": kind, **found})
        equal = "bit-equal" if not found["different"] else f"{len(found['different'])} tensors differ"
        print(
            f"{model:13} {dtype:9} {kind:9}  {found['tensors']} gradients {equal}; "
            f"{found['dead']} dead; "
            f"sync errors {found['sync_errors']}; synchronising calls {found['synchronising_calls']}",
            flush=True,
        )
    torch.use_deterministic_algorithms(False)
    result["host_us"] = host_time(device)
    print("host time added, us a microbatch:", {name: round(value, 1) for name, value in result["host_us"].items()})
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
