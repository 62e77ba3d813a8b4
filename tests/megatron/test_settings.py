"""Which settings forbid pruning: read from the real config classes; a field that a version lacks forbids nothing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from gradprune.megatron.settings import module_reasons_against, reasons_against


def make_config(**fields: Any) -> TransformerConfig:
    """A real config, with fields set after its own checks, many of which ask for a GPU."""
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2)
    for name, value in fields.items():
        assert hasattr(config, name), f"this version has no {name}"
        setattr(config, name, value)
    return config


FORBIDDEN = {
    "mtp_num_layers": 1,
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "cuda_graph_impl": "local",
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "hybrid_context_parallel": True,
    "dsa_indexer_loss_coeff": 0.1,
}
NEWER = {"moe_paged_stash": True, "gtp_weight_remat_size": 2, "overlap_dispatch_backward_with_experts_wgrad": True}


def test_prunes_default_config():
    assert not list(reasons_against(make_config(), []))


@pytest.mark.parametrize("name", FORBIDDEN)
def test_keeps_everything_live_under(name):
    (reason,) = reasons_against(make_config(**{name: FORBIDDEN[name]}), [])
    assert reason.kind == "setting" and f"TransformerConfig.{name}={FORBIDDEN[name]!r}: " in reason.message


@pytest.mark.parametrize("name", NEWER)
def test_keeps_everything_live_under_newer_setting(name):
    if not hasattr(make_config(), name):
        assert not list(reasons_against(make_config(), []))  # absent here: forbids nothing
        return
    (reason,) = reasons_against(make_config(**{name: NEWER[name]}), [])
    assert name in reason.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01}, "moe_aux_loss_coeff=0.01"),
        ({"num_moe_experts": 4, "moe_aux_loss_coeff": [0.0, 0.5]}, "moe_aux_loss_coeff=[0.0, 0.5]"),
        ({"num_moe_experts": 4, "moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff=0.001"),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, "fp8_recipe='delayed'"),
    ],
)
def test_keeps_two_settings_that_go_together(fields, named):
    (reason,) = reasons_against(make_config(**fields), [])
    assert named in reason.message


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_aux_loss_coeff": 0.01},  # no experts, no router
        {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "aux_loss"},
        {"num_moe_experts": 4, "moe_aux_loss_coeff": [0.0, 0.0], "moe_z_loss_coeff": None},
        {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        {"fp8": None, "fp8_recipe": "delayed"},  # the default recipe of a model without fp8
        {"cuda_graph_impl": "none", "mtp_num_layers": None, "dsa_indexer_loss_coeff": 0.0},
    ],
)
def test_prunes_what_only_looks_like_it(fields):
    assert not list(reasons_against(make_config(**fields), []))


@pytest.mark.parametrize("name", ["use_megatron_fsdp", "use_custom_fsdp", "delay_wgrad_compute"])
def test_keeps_ddp_setting(name):
    ddp_config = DistributedDataParallelConfig()
    assert not list(reasons_against(make_config(), [SimpleNamespace(ddp_config=ddp_config)]))  # type: ignore[list-item]
    setattr(ddp_config, name, True)
    (reason,) = reasons_against(make_config(), [SimpleNamespace(ddp_config=ddp_config)])  # type: ignore[list-item]
    assert f"DistributedDataParallelConfig.{name}=True" in reason.message


@pytest.mark.parametrize(
    "name", sorted({*FORBIDDEN, "moe_aux_loss_coeff", "moe_z_loss_coeff", "num_moe_experts", "fp8"})
)
def test_prunes_config_without_field(name):
    """Another version of megatron-core: its config class has all fields but one."""
    full = make_config()
    rest = [field.name for field in dataclasses.fields(full) if field.name != name]
    other = dataclasses.make_dataclass("TransformerConfig", rest)(*(getattr(full, field) for field in rest))
    assert not hasattr(other, name)
    assert not list(reasons_against(other, []))


def test_keeps_modules_by_class():
    class MultiTokenPredictionBlock(torch.nn.Module):
        pass

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mtp = MultiTokenPredictionBlock()

    (reason,) = module_reasons_against([Model()])
    assert "mtp is a MultiTokenPredictionBlock" in reason.message
    assert not list(module_reasons_against([torch.nn.Linear(2, 2)]))
