"""Settings of megatron-core under which a dead microbatch still has a gradient, or under which skipping its backward
breaks the schedule. Read from real config objects and modules; a field that a version does not have forbids nothing.

Tried with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradprune.facts import Reason

Forbids = Callable[[Any], bool]


@dataclass(frozen=True)
class _Setting:
    """A field of a config, the values of it that forbid pruning, and why."""

    name: str
    forbids: Forbids
    why: str

    def reason(self, config: Any) -> Reason | None:
        if not hasattr(config, self.name):
            return None
        value = getattr(config, self.name)
        if not self.forbids(value):
            return None
        shown = value.value if hasattr(value, "value") else value
        return Reason("setting", f"{type(config).__name__}.{self.name}={shown!r}: {self.why}")


def _any_nonzero(value: Any) -> bool:
    return any(value) if isinstance(value, list | tuple) else bool(value)


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _is_graph(value: Any) -> bool:
    return value not in (None, "none")


def _is_delayed(value: Any) -> bool:
    return value == "delayed"


_GRAPHS = "a graph captures forwards and backwards in a fixed order, and a pruned microbatch would break it"
_OFFLOAD = "it pairs every forward with a backward by count, and a pruned backward shifts the pairs"
_SPLIT = "the forward or the weight gradient runs outside of forward_step and of its backward"

_MODEL: tuple[_Setting, ...] = (
    _Setting("mtp_num_layers", bool, "the loss of multi-token prediction does not depend on the advantages"),
    _Setting("overlap_moe_expert_parallel_comm", bool, _SPLIT),
    _Setting("delay_wgrad_compute", bool, _SPLIT),
    _Setting("overlap_dispatch_backward_with_experts_wgrad", bool, _SPLIT),
    _Setting("enable_cuda_graph", bool, _GRAPHS),
    _Setting("external_cuda_graph", bool, _GRAPHS),
    _Setting("cuda_graph_impl", _is_graph, _GRAPHS),
    _Setting("cpu_offloading", bool, _OFFLOAD),
    _Setting("fine_grained_activation_offloading", bool, _OFFLOAD),
    _Setting("moe_paged_stash", bool, _OFFLOAD),
    _Setting("hybrid_context_parallel", bool, "its own schedule of microbatches was never tried"),
    _Setting("gtp_weight_remat_size", _more_than_one, "weights are gathered in the backward, by ranks of other data"),
    _Setting("dsa_indexer_loss_coeff", bool, "the indexer's loss does not depend on the advantages"),
)
_MOE: tuple[_Setting, ...] = (
    _Setting("moe_aux_loss_coeff", _any_nonzero, "the router's auxiliary loss does not depend on the advantages"),
    _Setting("moe_z_loss_coeff", bool, "the router's z-loss does not depend on the advantages"),
)
_FP8: tuple[_Setting, ...] = (
    _Setting("fp8_recipe", _is_delayed, "its scales are made of the history of all microbatches, backward included"),
)
_DATA_PARALLEL: tuple[_Setting, ...] = (
    _Setting("use_megatron_fsdp", bool, "it reduces gradients in every backward, and waits for all ranks there"),
    _Setting("use_custom_fsdp", bool, "it reduces gradients in every backward, and waits for all ranks there"),
    _Setting("delay_wgrad_compute", bool, _SPLIT),
)
_MODULES = {
    "TorchFullyShardedDataParallel": "it reduces gradients in every backward, and waits for all ranks there",
    "FullyShardedDataParallel": "it reduces gradients in every backward, and waits for all ranks there",
    "MultiTokenPredictionBlock": "the loss of multi-token prediction does not depend on the advantages",
}


def reasons_against(config: Any, chunks: Iterable[torch.nn.Module]) -> Iterator[Reason]:
    """Why nothing may be pruned in models of `config`, wrapped as `chunks` are. Cheap enough for every microbatch."""
    settings = _MODEL
    if getattr(config, "num_moe_experts", None):
        settings += _MOE
    if getattr(config, "fp8", None):
        settings += _FP8
    yield from filter(None, (setting.reason(config) for setting in settings))
    for chunk in chunks:
        if hasattr(chunk, "ddp_config"):
            yield from filter(None, (setting.reason(chunk.ddp_config) for setting in _DATA_PARALLEL))


def module_reasons_against(chunks: Iterable[torch.nn.Module]) -> Iterator[Reason]:
    """The same, by the modules that `chunks` are made of; walks through all of them."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            why = next((_MODULES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _MODULES), None)
            if why is not None:
                yield Reason("setting", f"{name or 'the model'} is a {type(module).__name__}: {why}")
