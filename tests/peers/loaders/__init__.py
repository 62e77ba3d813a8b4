"""One file per trainer: how to call its losses as ``loss(logp, old, adv, mask, ref) -> scalar``, float32 ``[R, T]``.

Each has ``DISTRIBUTION``, its name in `pins.txt`, and ``losses(root) -> {"trainer/loss": callable}``. R rows, T tokens;
`logp` is the policy's, `old` the sampler's, `ref` the reference's log-probability of each token; `mask` is 0 or 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import torch

Loss = Callable[..., torch.Tensor]
TRAINERS = ("trl", "liger", "trinity", "verl", "openrlhf", "skyrl", "areal", "unsloth")


def load(trainer: str, roots: dict[str, Path]) -> dict[str, Loss]:
    """The losses of one of `TRAINERS`, from the unpacked wheels of `wheels.roots`."""
    module = importlib.import_module(f"{__name__}.{trainer}")
    losses: dict[str, Loss] = module.losses(roots[module.DISTRIBUTION])
    return losses
