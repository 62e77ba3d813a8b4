"""Backward operators of ATen: linear in the cotangent, so zero gives zero where the saved tensors are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from gradprune.passes import intervals
from gradprune.passes.affine import groups_of
from gradprune.passes.domain import NO_NEEDS, Known, Needs, Value, joined_rows, moved_facts, moved_rows
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.rules.gathers import same_positions
from gradprune.passes.transfer import axis, dtype_of, forgotten, only_zeros, operands, pointwise, remapped, shape_of

_NOT_MULTIPLIED: Final = frozenset(
    {"attn_bias", "attn_mask", "bias", "cum_seq_q", "cum_seq_k", "philox_seed", "philox_offset"}
)
"""Saved arguments whose value never multiplies the cotangent: an additive mask holds -inf by design."""

LINEAR: Final = (
    "aten.native_layer_norm_backward.default",
    "aten._fused_rms_norm_backward.default",
    "aten.native_group_norm_backward.default",
    "aten.native_batch_norm_backward.default",
    "aten.embedding_dense_backward.default",
    "aten.convolution_backward.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten._flash_attention_backward.default",
    "aten._efficient_attention_backward.default",
    "aten.max_pool2d_with_indices_backward.default",
    "aten.avg_pool2d_backward.default",
    "aten._adaptive_avg_pool2d_backward.default",
    "aten.unfold_backward.default",
    "aten.glu_backward.default",
    "aten._prelu_kernel_backward.default",
    "aten.reflection_pad1d_backward.default",
    "aten.reflection_pad2d_backward.default",
    "aten.replication_pad1d_backward.default",
    "aten.replication_pad2d_backward.default",
)


@rule(*LINEAR)
def linear_in_cotangent(flow: Flow, node: Node, *_: Any, **__: Any) -> Any:
    needs = _zero_cotangent(flow, node)
    if needs is None:
        return None
    meta = node.meta["val"]
    parts = meta if isinstance(meta, tuple | list) else (meta,)
    zeros = tuple(
        Value(groups_of(part.shape), part.dtype, Known(0, needs)) if hasattr(part, "shape") else None for part in parts
    )
    return zeros if isinstance(meta, tuple | list) else zeros[0]


def _zero_cotangent(flow: Flow, node: Node) -> Needs | None:
    """What makes every term of a linear backward zero; None if a cotangent is not zero."""
    cotangents = [source for source in node.all_input_nodes if source in flow.cotangents]
    if not cotangents or not _settings_finite(node):
        return None
    needs: Needs = NO_NEEDS
    for source in cotangents:
        const = flow.value(source).const
        if const is None or const.value != 0:
            return None
        needs |= const.needs
    for name, argument in _named_arguments(node):
        if not isinstance(argument, Node) or argument in flow.cotangents or name in _NOT_MULTIPLIED:
            continue
        finite = flow.finite(argument) if isinstance(flow.values[argument], Value) else NO_NEEDS
        if finite is None:
            return None
        needs |= finite
    return needs


def _named_arguments(node: Node) -> list[tuple[str, Any]]:
    """The operator's arguments by name, lists opened."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    pairs = [*zip(names, node.args), *node.kwargs.items()]
    return [(name, item) for name, value in pairs for item in (value if isinstance(value, list | tuple) else [value])]


def _settings_finite(node: Node) -> bool:
    """Whether no number that may scale the cotangent is infinite or NaN."""
    return all(math.isfinite(item) for _, item in _named_arguments(node) if isinstance(item, float))


ELEMENTWISE: Final = (
    "aten.silu_backward.default",
    "aten.mish_backward.default",
    "aten.elu_backward.default",
    "aten.softplus_backward.default",
    "aten.log_sigmoid_backward.default",
    "aten.hardswish_backward.default",
    "aten.hardsigmoid_backward.default",
    "aten.native_dropout_backward.default",
)
"""Cotangent times a function of the saved tensors at the same position that is finite wherever they are."""

OVERFLOWING: Final = (
    "aten.tanh_backward.default",
    "aten.sigmoid_backward.default",
    "aten.gelu_backward.default",
    "aten.mse_loss_backward.default",
    "aten.smooth_l1_loss_backward.default",
    "aten.huber_loss_backward.default",
    "aten.binary_cross_entropy_backward.default",
    "aten.soft_margin_loss_backward.default",
)
"""The same, but the function overflows for large saved numbers: then 0 times it is NaN, and the result not finite."""

SELECTING: Final = (
    "aten.threshold_backward.default",
    "aten.leaky_relu_backward.default",
    "aten.hardtanh_backward.default",
    "aten.softshrink_backward.default",
    "aten.hardshrink_backward.default",
    "aten.rrelu_with_noise_backward.default",
)
"""The cotangent, scaled by a number or replaced by zero; the saved tensor only decides."""


@rule(*ELEMENTWISE)
def elementwise_backward(flow: Flow, node: Node, *_: Any, **__: Any) -> Value | None:
    return _elementwise(flow, node, _saved_finite)


@rule(*OVERFLOWING)
def overflowing_backward(flow: Flow, node: Node, *_: Any, **__: Any) -> Value | None:
    return _elementwise(flow, node, _result_finite)


@rule(*SELECTING)
def selecting_backward(flow: Flow, node: Node, *_: Any, **__: Any) -> Value | None:
    return _elementwise(flow, node, lambda *_: NO_NEEDS)


def _saved_finite(flow: Flow, node: Node, saved: Sequence[Node]) -> Needs | None:
    needs: Needs | None = NO_NEEDS
    for argument in saved:
        finite = flow.finite(argument)
        needs = needs | finite if needs is not None and finite is not None else None
    return needs


def _result_finite(flow: Flow, node: Node, saved: Sequence[Node]) -> Needs | None:
    small = all(intervals.magnitude(flow.value(argument).bounds) <= 2 for argument in saved)
    return _saved_finite(flow, node, saved) if small else flow.condition("finite", node)


def _elementwise(flow: Flow, node: Node, needed: Callable[..., Needs | None]) -> Value | None:
    named = [(name, argument) for name, argument in _named_arguments(node) if isinstance(argument, Node)]
    gradient, saved = named[0][1], [argument for name, argument in named[1:] if name != "buffer"]
    if gradient not in flow.cotangents or any(argument in flow.cotangents for argument in saved):
        return None
    if not _settings_finite(node):
        return None
    needs = needed(flow, node, saved)

    def combine(p: Known | None, *_: Known | None) -> Known | None:
        return Known(0, p.needs | needs) if p is not None and p.value == 0 and needs is not None else None

    return pointwise(node, operands(flow, dtype_of(node), gradient, *saved), combine)


@rule("aten._log_softmax_backward_data.default", "aten._softmax_backward_data.default")
def softmax_backward(flow: Flow, node: Node, gradient: Any, output: Any, dim: int, _: Any) -> Value | None:
    """Zero where the cotangent is zero all along the dimension.

    With the log, ``g - exp(output) * sum(g)``: exp of a log-probability is at most 1 also where that is -inf.
    """
    value, saved = flow.value(gradient), flow.value(output)
    needs = flow.notnan(output) if "log" in str(node.target) else flow.finite(output)
    if needs is None:
        return None
    place = axis(dim, len(value.dims))
    read = remapped(value, value.dims, forgotten(value.dims[place : place + 1]))
    const = Known(0, value.const.needs | needs) if value.const is not None and value.const.value == 0 else None
    saved_rows = moved_rows(saved.rows, same_positions(saved.dims, value.dims, {place}))
    facts, rows = only_zeros(read.facts, needs), joined_rows([read.rows, saved_rows])
    return Value(value.dims, dtype_of(node), const, facts, rows=rows)


@rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(
    flow: Flow, node: Node, gradient: Any, a: Any, target: Any, weight: Any, reduction: int, _: Any, total: Any
) -> Value | None:
    """The log-probabilities are not read; a mean (reduction 1) divides by the total weight.

    The gradient [N, C, ...] has one class dimension more than the cotangent and the target [N, ...].
    """
    value, wanted = flow.value(gradient), flow.value(target)
    needs = flow.finite(weight) if weight is not None else NO_NEEDS
    divisor = flow.nonzero(total) if reduction == 1 else NO_NEEDS
    if needs is None or divisor is None:
        return None
    needs |= divisor
    dims = groups_of(shape_of(node))
    places = (*dims[:1], *dims[2:]) if len(dims) > 1 else ()
    of_gradient, of_target = (same_positions(v.dims, places, set()) for v in (value, wanted))
    const = Known(0, value.const.needs | needs) if value.const is not None and value.const.value == 0 else None
    rows = joined_rows([moved_rows(value.rows, of_gradient), moved_rows(wanted.rows, of_target)])
    facts = only_zeros(moved_facts(value.facts, of_gradient), needs)
    return Value(dims, dtype_of(node), const, facts, rows=rows)
