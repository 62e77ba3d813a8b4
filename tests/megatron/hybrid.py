"""HybridModel, which is to replace GPTModel, of attention and MLP layers without TransformerEngine; from 0.19 on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from gradprune.patching import replaced
from tests.megatron.attention import PlainAttention

ATTENTION = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, core_attention=PlainAttention, linear_proj=RowParallelLinear
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
    ),
)
PERCEPTRON = ModuleSpec(
    module=MLPLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=partial(
            MLP.as_mlp_submodule,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
        mlp_bda=get_bias_dropout_add,
    ),
)


def hybrid_model(config: Any, **kwargs: Any) -> torch.nn.Module:
    """`config.num_layers` layers, attention and MLP by turns."""
    stack = ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(attention_layer=ATTENTION, mlp_layer=PERCEPTRON),
    )
    with replaced(hybrid_block, "TENorm", WrappedTorchNorm):
        return HybridModel(config, stack, hybrid_layer_pattern="*-" * (config.num_layers // 2), **kwargs)
