"""What the probe says of released trainers' losses: may their rows move between microbatches? One JSON line a loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradprune.probe import probe_normaliser
from tests.peers import truth, wheels
from tests.peers.loaders import TRAINERS, load


def probe(loss: Callable[..., torch.Tensor], seed: int) -> str:
    """The probe's answer on a drawn batch whose every row has an advantage."""
    batch = truth.draw(seed)
    rows = torch.arange(1.0, len(batch.adv) + 1)
    batch = replace(batch, adv=torch.where(rows % 2 == 0, rows, -rows)[:, None].expand_as(batch.adv).clone())
    args = dict(zip(("logp", "old", "adv", "mask", "ref"), batch.args()))

    def by_name(logp: Any, old: Any, adv: Any, mask: Any, ref: Any) -> torch.Tensor:
        return loss(logp, old, adv, mask, ref)

    with torch.compiler.set_stance("force_eager"):
        return probe_normaliser(by_name, args, wrt="logp")


def main(trainers: Sequence[str]) -> None:
    roots = wheels.roots()
    for trainer in trainers or TRAINERS:
        for name, loss in load(trainer, roots).items():
            print(json.dumps({"name": name, "answers": [probe(loss, seed) for seed in truth.DRAWS]}))


if __name__ == "__main__":
    main(sys.argv[1:])
