"""Torch's own data parallelism around a model: when a microbatch may be dead under it, and who must hear of its zeros.

DistributedDataParallel reduces gradients from hooks that run when each parameter's gradient arrives. A dead microbatch
whose backward is to be reduced therefore delivers zeros to every parameter: the collectives are the unpruned ones.
Fully sharded models gather and scatter inside their backward; a rank that skips it leaves the others waiting.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.nn.parallel import DistributedDataParallel


def core_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module that computes: what a DistributedDataParallel wraps, else `module` itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


class DataParallel:
    """What the wrappers inside one compiled step's models ask for."""

    def __init__(self) -> None:
        self._wrappers: weakref.WeakKeyDictionary[torch.nn.Module, _Wrappers] = weakref.WeakKeyDictionary()
        self._reduced: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def objection(
        self, models: Iterable[torch.nn.Module], looks_after: Callable[[torch.nn.Module], bool]
    ) -> str | None:
        """Why the coming microbatch must run live; None if it may be dead. looks_after: whether the schedule sees to it
        that the ranks of a fully sharded module issue the same collectives."""
        for model in models:
            wrappers = self._of(model)
            if wrappers.objection is not None:
                return wrappers.objection
            if not all(map(looks_after, wrappers.sharded())):
                return (
                    "the model is fully sharded: its backward has collectives, which every rank must issue: pass "
                    "schedule=gradprune.fully_sharded.attach(model)"
                )
            if any(ddp not in self._reduced for ddp in _reducing(wrappers)):
                return "DistributedDataParallel lays out its buckets by the first backward that it reduces"
        return None

    def replicates(self, model: torch.nn.Module) -> bool:
        """Whether a DistributedDataParallel is in `model`: then `ran_live` must be told of it."""
        return bool(self._of(model).replicated())

    def ran_live(self, models: Iterable[torch.nn.Module]) -> None:
        for model in models:
            self._reduced.update(_reducing(self._of(model)))

    def hears_all(self, models: Iterable[torch.nn.Module]) -> bool:
        """Whether every reached parameter must receive a gradient, also where it holds one already."""
        wrappers = [ddp for model in models for ddp in self._of(model).replicated()]
        return any(ddp.require_backward_grad_sync or ddp.find_unused_parameters or ddp.static_graph for ddp in wrappers)

    def _of(self, model: torch.nn.Module) -> _Wrappers:
        if model not in self._wrappers:
            self._wrappers[model] = _Wrappers(model)
        return self._wrappers[model]


class _Wrappers:
    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        found = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._replicated = [weakref.ref(module) for module in found]
        self._sharded = [weakref.ref(module) for module in modules if is_sharded(module)]
        self.objection = next((text for module in modules if (text := _objection(module)) is not None), None)

    def sharded(self) -> list[torch.nn.Module]:
        return [module for ref in self._sharded if (module := ref()) is not None]

    def replicated(self) -> list[DistributedDataParallel]:
        return [module for ref in self._replicated if (module := ref()) is not None]


def _reducing(wrappers: _Wrappers) -> list[DistributedDataParallel]:
    return [ddp for ddp in wrappers.replicated() if ddp.require_backward_grad_sync]


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module."""
    sharding = sys.modules.get("torch.distributed.fsdp")  # not imported: then nothing is sharded
    return sharding is not None and isinstance(module, sharding.FSDPModule)


def _objection(module: torch.nn.Module) -> str | None:
    sharding = sys.modules.get("torch.distributed.fsdp")
    if sharding is not None and isinstance(module, sharding.FullyShardedDataParallel):
        return "the model is a FullyShardedDataParallel, of which nothing is pruned: use fully_shard"
    if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
        return "DataParallel runs replicas of the model in threads: use DistributedDataParallel"
    if isinstance(module, torch.nn.SyncBatchNorm) and torch.distributed.is_initialized():
        return "SyncBatchNorm has collectives in its backward, which every rank must issue"
    if isinstance(module, DistributedDataParallel) and module.mixed_precision is not None:
        return "DistributedDataParallel's mixed precision casts parameters in hooks of its own: use torch.autocast"
    return None
