"""Operators that are known and of which nothing is claimed but what their dtype says."""

from __future__ import annotations

from typing import Any, Final

from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule

OPAQUE: Final = (
    "aten.arange.default",
    "aten.arange.start",
    "aten.arange.start_step",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten.empty_strided.default",
    "aten.linspace.default",
    "aten.tril_indices.default",
    "aten.triu_indices.default",
    "aten.randn.default",
    "aten.randn_like.default",
    "aten.randint.default",
    "aten.randint.low",
    "aten.randperm.default",
    "aten.multinomial.default",
    "aten.normal_functional.default",
    "aten.nonzero.default",
    "aten.unique_dim.default",
    "aten._unique2.default",
    "aten.unique_consecutive.default",
    "aten.searchsorted.Tensor",
    "aten.bucketize.Tensor",
    "aten.bincount.default",
    "aten.histc.default",
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    "aten.log_sigmoid_forward.default",
    "aten.native_layer_norm.default",
    "aten._fused_rms_norm.default",
    "aten.native_group_norm.default",
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default",
    "aten.max_pool2d_with_indices.default",
    "aten.avg_pool2d.default",
    "aten._adaptive_avg_pool2d.default",
    "aten.glu.default",
    "aten._prelu_kernel.default",
    "aten._cdist_forward.default",
    "aten._weight_norm_interface.default",
    "aten.upsample_bilinear2d.default",
    "aten.upsample_nearest2d.default",
    "aten.as_strided.default",
    "aten.as_strided_copy.default",
    "aten.view.dtype",
    "aten.complex.default",
    "aten.view_as_complex.default",
    "aten.view_as_real.default",
    "aten.polar.default",
)


@rule(*OPAQUE)
def nothing_claimed(flow: Flow, node: Node, *_: Any, **__: Any) -> None:
    return None
