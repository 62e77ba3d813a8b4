"""Pictures of a step: one bar a rank, one block a microbatch, before and after planning."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from ours import BUDGET, as_arrays, build
from peers import PEERS
from rollouts import qwen3_4b_forward, sample_rollout
from yardstick import DEAD, LIVE

COLOURS = {True: "#4878a8", False: "#c9c9c9"}


def draw_timelines(folder: Path) -> Path:
    """Writes planner_timelines.png of 8 ranks with 64 sequences each, 60 % of groups dead; returns its path."""
    folder.mkdir(exist_ok=True)
    rollout = sample_rollout(512, 8, 0.6)
    flops = qwen3_4b_forward(rollout.lengths)
    plans = {name: PEERS[name](rollout.lengths, flops, BUDGET, 8) for name in list(PEERS)[2:]}
    plans["gradprune"] = as_arrays(build(rollout, 8), 512)
    figure, axes = plt.subplots(1, len(plans), figsize=(11, 2.6), sharex=True, sharey=True)
    for axis, (name, (pack_of, rank)) in zip(axes, plans.items()):
        live = np.bincount(pack_of, ~rollout.dead, len(rank)) > 0
        time = np.bincount(pack_of, flops, len(rank)) * np.where(live, LIVE, DEAD) / 1e15
        _draw_plan(axis, rank, live, time)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("PFLOP of a rank", fontsize=8)
    axes[0].set_ylabel("rank", fontsize=8)
    figure.tight_layout()
    patches = [Patch(color=COLOURS[live], label=name) for live, name in ((True, "live"), (False, "dead"))]
    axes[-1].legend(handles=patches, loc="center right")
    path = folder / "planner_timelines.png"
    figure.savefig(path, dpi=110)
    return path


def _draw_plan(axis: plt.Axes, rank: np.ndarray, live: np.ndarray, time: np.ndarray) -> None:
    at = np.zeros(rank.max() + 1)
    for pack in np.lexsort((time, live)).tolist():
        colour = COLOURS[bool(live[pack])]
        axis.barh(rank[pack], time[pack], left=at[rank[pack]], color=colour, edgecolor="white", linewidth=0.6)
        at[rank[pack]] += time[pack]
    axis.axvline(at.max(), color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)
