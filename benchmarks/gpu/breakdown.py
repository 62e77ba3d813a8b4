"""Where the time of a dead microbatch goes, when question 1 falls short of its limit.

    python benchmarks/gpu/breakdown.py --model megatron --layers 24 --out breakdown.json

*alone*: a step whose microbatches are all dead, pruned, beside their forwards under no_grad: busy and idle time of the
GPU, host time, allocations, and the kernels that take longer in one of them. *mixed*: the GPU time of each microbatch
of a step in which 60 % are dead, unpruned, pruned, and with the forwards of the dead ones under no_grad by hand; and
what the driver reported of clock and power meanwhile: a GPU at its power limit runs the same kernels slower.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from qwen import TINY, Shape, make_batches
from saving import ZERO, HuggingFace, Megatron, WithoutGradient, plan_of, synchronize
from torch.autograd import DeviceType

import gradprune

CALLS = ("cudaMalloc", "cudaFree", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Marked:
    """A step that notes on the GPU's own clock when each of its calls begins."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self._events: list[torch.cuda.Event] = []

    def __call__(self, *args: Any) -> Any:
        self.mark()
        return self._step(*args)

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def intervals(self) -> list[float]:
        """Milliseconds from each mark to the next."""
        self.mark()
        synchronize()
        found = [before.elapsed_time(after) for before, after in zip(self._events, self._events[1:])]
        self._events = []
        return found


class Clocks:
    """Samples the clock of the multiprocessors (MHz) and the power (W) while it is open."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        self.samples: list[tuple[int, float]] = []

    def __enter__(self) -> Clocks:
        self.samples, self._open = [], True
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open = False
        self._thread.join()

    def _sample(self) -> None:
        while self._open:
            clock = self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM)
            self.samples.append((clock, self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1e3))
            time.sleep(0.02)

    def means(self) -> dict[str, float]:
        return {"mhz": mean(clock for clock, _ in self.samples), "watt": mean(power for _, power in self.samples)}


def profiled(call: Callable[[], None]) -> dict[str, Any]:
    """What `call` does to GPU and host; milliseconds. kernels: total by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        synchronize()
    events = profile.events()
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    busy, first, last = union((event.time_range.start, event.time_range.end) for event in on_gpu)
    kernels: Counter[str] = Counter()
    for event in on_gpu:
        kernels[event.name] += (event.time_range.end - event.time_range.start) / 1e3
    return {
        "host_ms": 1e3 * host,
        "span_ms": (last - first) / 1e3,
        "busy_ms": busy / 1e3,
        "idle_ms": (last - first - busy) / 1e3,
        "calls": {name: sum(event.name == name for event in events) for name in CALLS},
        "kernels": dict(kernels),
    }


def union(ranges: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Length of the union of some intervals, its begin and its end."""
    covered, begin, reached = 0.0, None, 0.0
    for start, end in sorted(ranges):
        begin = start if begin is None else begin
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered, begin or 0.0, reached


def measure(args: argparse.Namespace) -> dict[str, Any]:
    shape = TINY if args.tiny else Shape(layers=args.layers)
    trainer = (Megatron if args.model == "megatron" else HuggingFace)(shape, torch.bfloat16, args.recompute, "cuda")
    if args.compile:
        trainer.model.compile()
    pruned = gradprune.compile(trainer.step, zero=ZERO)
    count, everything = args.microbatches, set(range(args.microbatches))
    mixed = set(range(round(0.6 * count)))
    data = {
        "alone": make_batches(count, args.tokens, everything, shape.vocabulary, "cuda"),
        "mixed": make_batches(count, args.tokens, mixed, shape.vocabulary, "cuda"),
    }

    def prune(which: str, dead: set[int], step: Any = pruned) -> None:
        trainer.run(step, plan_of(data[which], dead).bind(data[which]), count)

    for _ in range(2):
        prune("alone", everything)
    prune("mixed", mixed)
    alone = {
        "no_grad": profiled(lambda: trainer.forward(data["alone"])),
        "pruned": profiled(lambda: prune("alone", everything)),
    }
    steps = {
        "unpruned": lambda: Marked(trainer.step),
        "pruned": lambda: Marked(pruned),
        "no_grad": lambda: Marked(WithoutGradient(trainer.step, mixed)),
    }
    times: dict[str, list[list[float]]] = {}
    clocks: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for name, make in steps.items():
            step = make()
            with Clocks() as sampled:
                prune("mixed", mixed, step)
                times.setdefault(name, []).append(step.intervals())
            clocks.setdefault(name, []).append(sampled.means())
    return {
        "question": "where the time goes",
        **{name: getattr(args, name) for name in ("model", "recompute", "compile", "tokens", "microbatches")},
        "layers": shape.layers,
        "torch": torch.__version__,
        "alone": alone,
        "mixed_ms": {name: [mean(column) for column in zip(*rows)] for name, rows in times.items()},
        "clocks": {
            name: {k: mean(found[k] for found in all_) for k in ("mhz", "watt")} for name, all_ in clocks.items()
        },
    }


def report(result: dict[str, Any]) -> str:
    count = result["microbatches"]
    lines = [
        f"{result['model']}, {result['layers']} layers, recompute {result['recompute']}, compile {result['compile']}"
    ]
    for name, found in result["alone"].items():
        per = {key: found[key] / count for key in ("host_ms", "span_ms", "busy_ms", "idle_ms")}
        lines.append(f"alone, {name:8} " + "  ".join(f"{key} {value:7.2f}" for key, value in per.items()))
        lines.append(f"                {found['calls']}")
    one, other = (result["alone"][name]["kernels"] for name in ("no_grad", "pruned"))
    differences = {name: (other.get(name, 0) - one.get(name, 0)) / count for name in {*one, *other}}
    for name, value in sorted(differences.items(), key=lambda item: -abs(item[1]))[:12]:
        lines.append(f"  {value:+8.3f} ms a microbatch  {name[:100]}")
    for name, row in result["mixed_ms"].items():
        clock = result["clocks"][name]
        lines.append(
            f"mixed, {name:8} {sum(row):7.1f} ms: "
            + " ".join(f"{value:6.1f}" for value in row)
            + f"   {clock['mhz']:.0f} MHz {clock['watt']:.0f} W"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["megatron", "hugging_face"], default="megatron")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test this script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args)
    print(report(result), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
