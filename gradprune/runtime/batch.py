"""What of a batch, and of the models that it is given to, tells one program from another before any of it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradprune.runtime.boundary import modules_of
from gradprune.trees import leaves

_CONSTANTS = (bool, int, float, str)
_FLAT = frozenset([torch.Tensor, *_CONSTANTS, type(None)])


def batch_leaves(batch: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a batch by its name there, ``"batch.advantages"``."""
    if is_flat(batch):
        return {f"batch.{key}": value for key, value in batch.items() if type(value) is torch.Tensor}
    return dict(leaves(batch, "batch"))


def is_flat(batch: Any) -> bool:
    """Whether a batch is a plain dict of tensors and constants."""
    return type(batch) is dict and all(map(_FLAT.__contains__, map(type, batch.values())))


def family(
    models: Mapping[str, torch.nn.Module], named: Mapping[str, torch.Tensor], constants: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What sets the programs of two microbatches apart before any of it runs: kinds of tensors, modes, constants, and
    which parameters there are and are trained."""
    kinds = tuple((name, tensor.dim(), tensor.dtype, tensor.device.type) for name, tensor in named.items())
    autocast = tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    modes = tuple((name, id(model), model.training) for name, model in models.items())
    owners = (module._parameters.values() for model in models.values() for module in modules_of(model))
    parameters = tuple((id(p), p.requires_grad) for owned in owners for p in owned if p is not None)
    return modes, parameters, autocast, kinds, constants


def batch_constants(batch: Any) -> tuple[tuple[str, str, Any], ...]:
    """The Python values in a batch that is a mapping, by name and type."""
    items = batch.items() if isinstance(batch, Mapping) else ()
    found = [(str(key), type(value).__name__, value) for key, value in items if isinstance(value, _CONSTANTS)]
    return tuple(sorted(found))
