"""Question 1: does pruning save what the arithmetic allows? Interleaved arms, Megatron-Core or transformers.

    python benchmarks/gpu/saving.py --model megatron --recompute --out results.json

Arms: unpruned; gradprune; no_grad (whoever writes the step knows the dead microbatches on the CPU, and runs their
forward under no_grad by hand); skip (reads each microbatch's advantages on the device and leaves the loop's body);
dropped (only the live rows are in the data). All from the same run:

    limit = dead share * (1 - time of a no-grad forward / time of a live microbatch)
    reach = dead microbatches * (their unpruned time - time of a no-grad forward) / unpruned time of the step

The two differ because an unpruned dead microbatch multiplies zeros, draws less power, and runs faster than a live one:
`reach` takes its time from the step whose microbatches are all dead; shares 0 and 1 must be among the shares. The
no_grad arm is what can be had in that very mixture of microbatches, at the clocks that the GPU has in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from qwen import (
    HAS_GPU,
    TINY,
    Batch,
    Shape,
    forward_step,
    hugging_face_model,
    hugging_face_step,
    make_batches,
    megatron_model,
    run_megatron,
    start_megatron,
)

import gradprune
from gradprune.megatron.cpu import emulate_cuda

ZERO = "advantages * loss_mask"
ARMS = ("unpruned", "gradprune", "no_grad", "skip", "dropped")


class Megatron:
    """Megatron's schedule over a GPTModel."""

    def __init__(self, shape: Shape, dtype: torch.dtype, recompute: bool, device: str) -> None:
        if not torch.distributed.is_initialized():
            start_megatron()
        self.model, _ = megatron_model(shape, dtype, recompute)
        self.step: Any = forward_step

    def run(self, step: Any, batches: Any, count: int) -> None:
        run_megatron(step, batches, count, self.model)

    def forward(self, batches: Sequence[Batch]) -> None:
        run_megatron(self.step, batches, len(batches), self.model, forward_only=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.main_grad.clone() for name, parameter in self.model.named_parameters()}


class HuggingFace:
    """A plain loop over a Qwen3ForCausalLM."""

    def __init__(self, shape: Shape, dtype: torch.dtype, recompute: bool, device: str) -> None:
        self.model = hugging_face_model(shape, dtype, recompute, device)
        self.step: Any = hugging_face_step

    def run(self, step: Any, batches: Any, count: int) -> None:
        self.model.zero_grad(set_to_none=False)
        for batch in batches:
            loss, _ = step(self.model, batch)
            (loss / count).backward()

    def forward(self, batches: Sequence[Batch]) -> None:
        with torch.no_grad():
            for batch in batches:
                self.step(self.model, batch)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


class WithoutGradient:
    """A step whose calls in `dead` are forwards under no_grad, and a loss that sends no gradient: pruning by hand."""

    def __init__(self, step: Any, dead: set[int]) -> None:
        self._step, self._dead, self._calls = step, dead, 0

    def __call__(self, *args: Any) -> Any:
        index, self._calls = self._calls, self._calls + 1
        if index not in self._dead:
            return self._step(*args)
        with torch.no_grad():
            first, rest = self._step(*args)
        if callable(rest):  # Megatron's forward_step
            return first, lambda output: _cut(rest, output)
        return first + _leaf(first), rest


def _cut(loss_func: Any, output: torch.Tensor) -> Any:
    with torch.no_grad():
        loss, metrics = loss_func(output)
    return loss + _leaf(loss), metrics


def _leaf(loss: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(loss, requires_grad=True)


def plan_of(batches: Sequence[Batch], dead: set[int]) -> gradprune.StepPlan:
    """The plan as a trainer makes it on the CPU, before the batches go to the device."""
    rows = len(batches[0]["advantages"])
    advantages = torch.cat([torch.zeros(rows) if i in dead else torch.ones(rows) for i in range(len(batches))])
    return gradprune.StepPlan.from_rollout(advantages, None, rows)


def arms(trainer: Any, pruned: Any, batches: Sequence[Batch], dead: set[int]) -> dict[str, Callable[[], None]]:
    count = len(batches)
    live = [batch for index, batch in enumerate(batches) if index not in dead]

    def skip() -> None:
        # What people write by hand; in a pipeline schedule it means to ask the device while the data is prepared.
        kept = [batch for batch in batches if batch["advantages"].any().item()]
        if kept:
            trainer.run(trainer.step, kept, len(kept))

    def dropped() -> None:
        if live:
            trainer.run(trainer.step, live, len(live))

    return {
        "unpruned": lambda: trainer.run(trainer.step, batches, count),
        "gradprune": lambda: trainer.run(pruned, plan_of(batches, dead).bind(batches), count),
        "no_grad": lambda: trainer.run(WithoutGradient(trainer.step, dead), batches, count),
        "skip": skip,
        "dropped": dropped,
    }


class Collector:
    """Milliseconds in full collections of Python's garbage collector, by what ran meanwhile."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._name, self._start = "", 0.0

    @contextmanager
    def charged(self, name: str) -> Iterator[None]:
        self._name = name
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now = 1e3 * time.perf_counter()
        if info["generation"] == 2 and phase == "start":
            self._start = now
        elif info["generation"] == 2:
            self.milliseconds[self._name] = self.milliseconds.get(self._name, 0.0) + now - self._start


def timed(call: Callable[[], None]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if HAS_GPU else "cpu"
    shape = TINY if args.tiny else Shape(layers=args.layers)
    kind = Megatron if args.model == "megatron" else HuggingFace
    trainer = kind(shape, getattr(torch, args.dtype), args.recompute, device)
    if args.compile:
        trainer.model.compile()
    pruned = gradprune.compile(trainer.step, zero=ZERO)
    dead_sets = {share: set(range(round(share * args.microbatches))) for share in args.shares}
    data = {
        share: make_batches(args.microbatches, args.tokens, dead, shape.vocabulary, device)
        for share, dead in dead_sets.items()
    }
    chosen = {share: arms(trainer, pruned, data[share], dead_sets[share]) for share in args.shares}
    first = args.shares[0]
    chosen[max(args.shares)]["gradprune"]()  # proves, and warms up
    chosen[first]["unpruned"]()
    trainer.forward(data[first])
    graphs = {"warm": compiled_graphs()}
    times: dict[tuple[float, str], list[float]] = {}
    forward: list[float] = []
    collector = Collector()
    for _ in range(args.repeats):
        forward.append(timed(lambda: trainer.forward(data[first])) / args.microbatches)
        for share in args.shares:
            for name, call in chosen[share].items():
                with collector.charged(name):
                    times.setdefault((share, name), []).append(timed(call))
    graphs["end"] = compiled_graphs()
    live = median(times[0, "unpruned"]) / args.microbatches
    zeros = median(times[1.0, "unpruned"]) / args.microbatches
    rows = [row(share, args.microbatches, live, zeros, median(forward), times) for share in args.shares]
    decisions = pruned.explain()
    return {
        "question": "saving against the limit",
        "model": args.model,
        "recompute": args.recompute,
        "compiled": args.compile,
        "compiled_graphs": graphs,
        "layers": shape.layers,
        "tokens": args.tokens,
        "microbatches": args.microbatches,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "live_ms": 1e3 * live,
        "unpruned_dead_ms": 1e3 * zeros,
        "no_grad_forward_ms": 1e3 * median(forward),
        "dead_microbatches": decisions.dead,
        "collector_ms": collector.milliseconds,
        "rows": rows,
    }


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def row(
    share: float, count: int, live: float, zeros: float, forward: float, times: dict[tuple[float, str], list[float]]
) -> dict[str, Any]:
    unpruned = median(times[share, "unpruned"])
    saving, by_hand = (
        1 - median(a / b for a, b in zip(times[share, name], times[share, "unpruned"]))
        for name in ("gradprune", "no_grad")
    )
    limit = share * (1 - forward / live)
    reach = round(share * count) * (zeros - forward) / unpruned
    return {
        "dead_share": share,
        **{f"{name}_ms": 1e3 * median(times[share, name]) for name in ARMS},
        "unpruned_spread": (max(times[share, "unpruned"]) - min(times[share, "unpruned"])) / unpruned,
        "limit": limit,
        "saving": saving,
        "saving_over_limit": saving / limit if limit else None,
        "reach": reach,
        "saving_over_reach": saving / reach if reach else None,
        "by_hand": by_hand,
        "saving_over_by_hand": saving / by_hand if share else None,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']}, {result['layers']} layers, {result['tokens']} tokens x {result['microbatches']}, "
        f"{result['dtype']}, recompute {result['recompute']}, compiled {result['compiled']} "
        f"({result['compiled_graphs']} graphs), {result['device']}, torch {result['torch']}",
        f"live microbatch {result['live_ms']:.1f} ms, dead unpruned {result['unpruned_dead_ms']:.1f} ms, "
        f"no-grad forward {result['no_grad_forward_ms']:.1f} ms",
        " dead   unpruned  gradprune    no_grad       skip    dropped   limit   reach  saving  /limit  /reach /no_grad",
    ]
    for item in result["rows"]:
        ratios = [item[f"saving_over_{what}"] for what in ("limit", "reach", "by_hand")]
        lines.append(
            f"{item['dead_share']:>5.0%} "
            + " ".join(f"{item[f'{name}_ms']:>7.0f} ms" for name in ARMS)
            + f" {item['limit']:>7.1%} {item['reach']:>7.1%} {item['saving']:>7.1%} "
            + " ".join(f"{ratio:>7.3f}" if ratio is not None else "      -" for ratio in ratios)
        )
    lines.append(f"in full collections: {', '.join(f'{k} {v:.0f} ms' for k, v in result['collector_ms'].items()) or 0}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["megatron", "hugging_face"], default="megatron")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=10)
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.3, 0.6, 0.9, 1])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to test this script")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    with nullcontext() if HAS_GPU else emulate_cuda():
        found = measure(arguments)
    print(table(found), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
