"""What the demo shows and leaves behind: a table, a JSON record and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import gradprune

matplotlib.use("agg")


@dataclass(frozen=True)
class Update:
    """One GRPO update. Groups by their answers; tokens of the dead microbatches and of all; seconds of both arms."""

    reward: float
    all_right: int
    all_wrong: int
    mixed: int
    dead_microbatches: int
    dead_tokens: int
    tokens: int
    seconds_unpruned: float
    seconds_pruned: float

    @property
    def microbatches(self) -> int:
        return self.all_right + self.all_wrong + self.mixed

    @property
    def saved(self) -> float:
        return 1 - self.seconds_pruned / self.seconds_unpruned


def show_updates(console: Console, updates: Sequence[Update]) -> None:
    """A row an update: groups all right, all wrong and mixed; dead microbatches and their share of the tokens."""
    table = Table(title="GRPO updates, each run in two arms from the same state", title_justify="left", box=SIMPLE)
    headings = ("", "reward", "right/wrong/mixed", "dead", "tokens", "full s", "pruned s", "saved")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, update in enumerate(updates, 1):
        table.add_row(
            str(number),
            f"{update.reward:.3f}",
            f"{update.all_right}/{update.all_wrong}/{update.mixed}",
            f"{update.dead_microbatches}/{update.microbatches}",
            f"{update.dead_tokens / update.tokens:.0%}",
            f"{update.seconds_unpruned:.2f}",
            f"{update.seconds_pruned:.2f}",
            f"{update.saved:.0%}",
        )
    console.print(table)


def show_totals(console: Console, updates: Sequence[Update], flops: gradprune.FlopReport, compared: int) -> None:
    """compared: how many tensors and metrics were compared and found equal."""
    unpruned, pruned = sum(u.seconds_unpruned for u in updates), sum(u.seconds_pruned for u in updates)
    dead, microbatches = sum(u.dead_microbatches for u in updates), sum(u.microbatches for u in updates)
    dead_tokens, tokens = sum(u.dead_tokens for u in updates), sum(u.tokens for u in updates)
    table = Table(title="Totals", title_justify="left", show_header=False, box=SIMPLE)
    table.add_row("dead microbatches", f"{dead} of {microbatches} ({dead / microbatches:.1%})")
    table.add_row("dead tokens", f"{dead_tokens} of {tokens} ({dead_tokens / tokens:.1%})")
    for phase in ("forward", "backward"):
        ran, saved = getattr(flops.run, phase), getattr(flops.pruned, phase)
        table.add_row(
            f"{phase} FLOPs", f"{ran / 1e9:.1f} G run, {saved / 1e9:.1f} G pruned ({saved / (ran + saved):.1%})"
        )
    table.add_row("time unpruned", f"{unpruned:.2f} s")
    table.add_row("time pruned", f"{pruned:.2f} s ({1 - pruned / unpruned:.1%} saved)")
    table.add_row("tensors compared", f"{compared} with torch.equal")
    table.add_row("bit-equal", "yes")
    console.print(table)


def write_record(
    path: Path, updates: Sequence[Update], flops: gradprune.FlopReport, certificates: Sequence[str]
) -> None:
    record = {
        "bit_equal": True,
        "certificates": list(certificates),
        "flops": flops.to_json(),
        "updates": [asdict(update) for update in updates],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def draw_picture(path: Path, updates: Sequence[Update]) -> None:
    """Dead share, reward and time saved over the updates."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    numbers = range(1, len(updates) + 1)
    axes.bar(numbers, [u.dead_tokens / u.tokens for u in updates], color="0.85", label="dead tokens, share of all")
    axes.plot(numbers, [u.reward for u in updates], marker="o", label="mean reward")
    axes.plot(numbers, [u.saved for u in updates], marker="s", label="time saved, share of the unpruned update")
    axes.set(
        xlabel="GRPO update", ylim=(min(0.0, *(u.saved for u in updates)), 1), title="Pruned, bit for bit the same"
    )
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
