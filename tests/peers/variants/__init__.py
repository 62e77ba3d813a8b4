"""Losses of our own, each with a habit of code that released trainers have: ``loss(logp, old, adv, mask, ref)``.

They stand for trainers that nobody has loaded yet. `tokens` weighs single tokens, `sequences` whole rows and packed
batches, `control` lets data decide (branches, counts, selections), `machinery` leaves plain eager code (autograd
functions, compiled helpers, casts, grad modes), in `coupled` rows without advantage matter to others, and in `live`
every loss has a gradient that no advantage switches off. `policies` are objectives as papers write them, `packed` what
packing, cutting and gathering does to them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

Loss = Callable[..., torch.Tensor]
FAMILIES = ("tokens", "sequences", "policies", "packed", "control", "machinery", "coupled", "live")


def variants(family: str) -> dict[str, Loss]:
    """``{"family/name": loss}`` of the public functions of one of `FAMILIES`, in the order of their file."""
    module = importlib.import_module(f"{__name__}.{family}")
    found = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {f"{family}/{name}": value for name, value in found.items() if callable(value) and _is_loss(name, value)}


def _is_loss(name: str, value: object) -> bool:
    code = getattr(value, "__code__", None)
    return not name.startswith("_") and code is not None and code.co_varnames[:3] == ("logp", "old", "adv")
