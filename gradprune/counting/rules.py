"""What one operator costs, and what its backward will cost: formulas over torch's own FLOP registry.

Nothing is registered globally: `EXTRA_FORMULAS` may be passed to ``FlopCounterMode(custom_mapping=...)``, and
`count_operator` reads both tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, shape_wrapper

aten = torch.ops.aten
Shape = Sequence[Any]
Formula = Callable[..., Any]


def attention_flops(query_shape: Shape, key_shape: Shape, value_shape: Shape, *args: Any, **kwargs: Any) -> Any:
    """Scores and their product with the values, dense: ``2 B H Sq Sk (D + Dv)``; grouped keys are broadcast."""
    *batch, length_q, width = query_shape
    return 2 * _product(batch) * length_q * key_shape[-2] * (width + value_shape[-1])


def attention_backward_flops(
    grad_shape: Shape, query_shape: Shape, key_shape: Shape, value_shape: Shape, *args: Any, **kwargs: Any
) -> Any:
    """Scores again, then the gradients of scores, values, queries and keys: ``2 B H Sq Sk (3 D + 2 Dv)``."""
    *batch, length_q, width = query_shape
    return 2 * _product(batch) * length_q * key_shape[-2] * (3 * width + 2 * value_shape[-1])


def packed_attention_flops(query_shape: Shape, value_shape: Shape, pairs: Any, *, backward: bool) -> Any:
    """Attention within each of several sequences in one row of tokens, ``[..., tokens, heads, width]``, dense.

    pairs: over sequences, the sum of queries times keys; of squared lengths where a sequence attends to itself.
    """
    heads, width = query_shape[-2:]
    return 2 * heads * pairs * (3 * width + 2 * value_shape[-1] if backward else width + value_shape[-1])


def product_flops(packet: Any, a_shape: Shape, b_shape: Shape) -> Any:
    """``2 [B] M K N`` of any matrix product in `FIRST_FACTOR`, at numbers or symbols."""
    if packet is aten._grouped_mm:
        return grouped_mm_flops(a_shape, b_shape)
    return 2 * _product(a_shape) * b_shape[-1]


def grouped_mm_flops(a_shape: Shape, b_shape: Shape, *args: Any, **kwargs: Any) -> Any:
    """One product per group, ``2 M K N`` over all groups; each row (or column) belongs to one group.

    Only where both operands are batched does every group have all rows and columns.
    """
    batch = a_shape[0] if len(a_shape) == len(b_shape) == 3 else 1
    return 2 * batch * a_shape[-2] * a_shape[-1] * b_shape[-1]


def _product(values: Shape) -> Any:
    result: Any = 1
    for value in values:
        result = result * value
    return result


_ATTENTION_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)

EXTRA_FORMULAS: dict[Any, Formula] = {
    **{getattr(aten, name): attention_flops for name in _ATTENTION_NAMES},
    **{getattr(aten, f"{name}_backward"): attention_backward_flops for name in _ATTENTION_NAMES},
    aten._grouped_mm: grouped_mm_flops,
    aten._scaled_grouped_mm: grouped_mm_flops,
}
"""Formulas that torch lacks (2.11 to 2.13), or has without grouped keys (2.11). They come before torch's own."""

_FORMULAS: dict[Any, Formula] = {packet: shape_wrapper(formula) for packet, formula in EXTRA_FORMULAS.items()}

FIRST_FACTOR = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._grouped_mm: 0}
"""Matrix products -> position of their first factor. The gradient of each factor is one product of equal cost."""

ATTENTION = {getattr(aten, name) for name in _ATTENTION_NAMES}
"""Attention kernels (queries, keys, values first); one kernel makes all gradients as soon as one is needed."""

PACKED_ATTENTION = {
    "aten::_flash_attention_forward": (0, 3),
    "aten::_flash_attention_backward": (1, 6),
    "aten::_efficient_attention_forward": (0, 4),
    "aten::_efficient_attention_backward": (1, 6),
    "torch_attn::_varlen_attn": (0, 3),
    "torch_attn::_varlen_attn_out": (1, 4),
    "torch_attn::_varlen_attn_backward": (1, 6),
}
"""Kernels for packed sequences, by name -> places of their queries (keys and values follow) and of the queries' offsets
(those of the keys follow; None where nothing is packed). FLOPs hang on the offsets, which are data."""

VARLEN_ATTENTION = {aten._flash_attention_forward, aten._efficient_attention_forward}
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_overrideable}


def count_operator(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int | None:
    """FLOPs of one call of an overload packet, or None where neither torch nor this module has a formula."""
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    return None if formula is None else formula(*args, **kwargs, out_val=out)


def derive_backward(packet: Any, args: Sequence[Any], out: Any, flops: int, needed: Sequence[bool]) -> int:
    """FLOPs that autograd will run for one counted call; `needed[i]`: argument i needs a gradient.

    Exact for matrix products, attention kernels and convolutions, which is all that can be differentiated and counted.
    """
    if packet in FIRST_FACTOR:
        first = FIRST_FACTOR[packet]
        return flops * (needed[first] + needed[first + 1])
    if packet in ATTENTION:
        query, key, value = (tensor.shape for tensor in args[:3])
        return attention_backward_flops((), query, key, value) if any(needed[:3]) else 0
    if packet in VARLEN_ATTENTION:
        width, value_width = args[0].shape[-1], args[2].shape[-1]
        return flops * (3 * width + 2 * value_width) // (width + value_width) if any(needed[:3]) else 0
    if packet in CONVOLUTIONS:
        x, weight, transposed = args[0], args[1], bool(args[6])
        return convolution_backward_flops(x.shape, weight.shape, out.shape, transposed, needed[:2])
    return 0


def convolution_backward_flops(
    x_shape: Shape, weight_shape: Shape, out_shape: Shape, transposed: bool, needed: Sequence[bool]
) -> int:
    """As `torch.utils.flop_counter` counts ``aten.convolution_backward`` (for groups > 1 it counts dense weights)."""

    def swap(shape: Shape) -> list[Any]:
        return [shape[1], shape[0], *shape[2:]]

    total = 0
    if needed[0]:
        total += conv_flop_count(list(out_shape), list(weight_shape), list(x_shape), not transposed)
    if needed[1]:
        first, second = (out_shape, x_shape) if transposed else (x_shape, out_shape)
        total += conv_flop_count(swap(first), swap(second), swap(weight_shape), transposed=False)
    return total
