"""Backward operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradprune.passes.rules.backward import ELEMENTWISE, OVERFLOWING, SELECTING
from tests.passes.builder import Builder, Node, aten
from tests.passes.catalogue.cases import case, dim_of


def cotangent(b: Builder, node: Node | None = None) -> Node:
    node = b.operand() if node is None else node
    return b.call(aten.mul.Tensor, node, b.tangent)


EXTRA: dict[str, Callable[[Builder, Node, Node], tuple[Any, ...]]] = {
    "elu_backward": lambda b, g, x: (g, 1.0, 1.0, 1.0, False, x),
    "softplus_backward": lambda b, g, x: (g, x, 1, 20),
    "log_sigmoid_backward": lambda b, g, x: (
        g,
        x,
        b.call(aten.exp.default, b.call(aten.neg.default, b.call(aten.abs.default, x))),
    ),
    "native_dropout_backward": lambda b, g, x: (g, b.boolean(x), b.pick((1.0, 2.0))),
    "mse_loss_backward": lambda b, g, x: (g, x, x, b.pick((0, 1, 2))),
    "smooth_l1_loss_backward": lambda b, g, x: (g, x, x, b.pick((0, 1, 2)), 1.0),
    "huber_loss_backward": lambda b, g, x: (g, x, x, b.pick((0, 1, 2)), 1.0),
    "soft_margin_loss_backward": lambda b, g, x: (g, x, x, b.pick((0, 2))),
    "logit_backward": lambda b, g, x: (g, x, b.pick((None, 1e-3))),
    "binary_cross_entropy_backward": lambda b, g, x: (g, x, x),
    "threshold_backward": lambda b, g, x: (g, x, 0),
    "leaky_relu_backward": lambda b, g, x: (g, x, 0.01, False),
    "hardtanh_backward": lambda b, g, x: (g, x, -1, 1),
    "softshrink_backward": lambda b, g, x: (g, x, 0.5),
    "hardshrink_backward": lambda b, g, x: (g, x, 0.5),
}


@case(*(name for name in (*ELEMENTWISE, *OVERFLOWING, *SELECTING) if "rrelu" not in name))
def elementwise_backward(b: Builder, op: Any) -> Any:
    g, x = b.together(2)
    arguments = EXTRA.get(str(op).split(".")[1], lambda b, g, x: (g, x))
    settings = {"approximate": b.pick(("none", "tanh"))} if "gelu" in str(op) else {}
    return b.call(op, *arguments(b, cotangent(b, g), x), **settings)


@case("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def softmax_backward(b: Builder, op: Any) -> Any:
    g, x = b.together(2)
    dim = dim_of(b, x)
    forward = aten._log_softmax if "log" in str(op) else aten._softmax
    return b.call(op, cotangent(b, g), b.call(forward.default, x, dim, False), dim, torch.float32)


@case("aten.nll_loss2d_backward.default")
def nll_loss2d_backward(b: Builder, op: Any) -> Any:
    if not b.rows:
        return None
    logs, target, reduction = b.data([b.rows, 3, b.tokens, 1]), b.index([b.rows, b.tokens, 1], 3), b.pick((0, 1, 2))
    forward = b.call(aten.nll_loss2d_forward.default, logs, target, None, reduction, -100)
    spread = b.call(aten.unsqueeze.default, b.start(), 2)
    g = cotangent(b, spread if reduction == 0 else b.call(aten.sum.default, b.start()))
    return b.call(op, g, logs, target, None, reduction, -100, b.item(forward, 1))


@case("aten.nll_loss_backward.default")
def nll_loss_backward(b: Builder, op: Any) -> Any:
    if not b.rows:
        return None
    logs, target, reduction = b.start(), b.index([b.rows], b.tokens), b.pick((0, 1, 2))
    forward = b.call(aten.nll_loss_forward.default, logs, target, None, reduction, -100)
    g = cotangent(
        b, b.call(aten.select.int, b.start(), 1, 0) if reduction == 0 else b.call(aten.sum.default, b.start())
    )
    return b.call(op, g, logs, target, None, reduction, -100, b.item(forward, 1))


@case("aten.native_layer_norm_backward.default")
def layer_norm_backward(b: Builder, op: Any) -> Any:
    x = b.data([b.rows, b.tokens])
    stats = b.call(aten.native_layer_norm.default, x, [b.tokens], None, None, 1e-5)
    g = cotangent(b, b.start())
    weight = b.data([b.tokens])
    return b.call(op, g, x, [b.tokens], b.item(stats, 1), b.item(stats, 2), weight, weight, [True, True, True])


@case("aten.embedding_dense_backward.default")
def embedding_backward(b: Builder, op: Any) -> Any:
    return b.call(op, cotangent(b, b.start()), b.index([b.rows], 4), 4, -1, False)


@case("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(b: Builder, op: Any) -> Any:
    q, k, v = (b.data([1, 2, 4, 8]) for _ in range(3))
    forward = b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
    g = silent(b, [1, 2, 4, 8])
    out, stats = b.item(forward, 0), b.item(forward, 1)
    return b.call(op, g, q, k, v, out, stats, 0.0, True)


def silent(b: Builder, shape: list[int]) -> Node:
    """A cotangent that is known to be zero, or not."""
    return cotangent(b, b.call(aten.expand.default, b.call(aten.sum.default, b.start()), shape))


@case("aten.native_group_norm_backward.default")
def group_norm_backward(b: Builder, op: Any) -> Any:
    x, weight = b.data([2, 4, 3]), b.data([4])
    stats = b.call(aten.native_group_norm.default, x, weight, weight, 2, 4, 3, 2, 1e-5)
    g = silent(b, [2, 4, 3])
    return b.call(op, g, x, b.item(stats, 1), b.item(stats, 2), weight, 2, 4, 3, 2, [True, True, True])


@case("aten.native_batch_norm_backward.default")
def batch_norm_backward(b: Builder, op: Any) -> Any:
    x, weight = b.data([3, 4, 2]), b.data([4])
    stats = b.call(aten.native_batch_norm.default, x, weight, weight, None, None, True, 0.1, 1e-5)
    g = silent(b, [3, 4, 2])
    saved = (b.item(stats, 1), b.item(stats, 2))
    return b.call(op, g, x, weight, None, None, *saved, True, 1e-5, [True, True, True])


@case("aten.max_pool2d_with_indices_backward.default")
def max_pool_backward(b: Builder, op: Any) -> Any:
    x = b.data([1, 2, 4, 4])
    pooled = b.call(aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2])
    return b.call(op, silent(b, [1, 2, 2, 2]), x, [2, 2], [2, 2], [0, 0], [1, 1], False, b.item(pooled, 1))


@case("aten.avg_pool2d_backward.default", "aten._adaptive_avg_pool2d_backward.default")
def avg_pool_backward(b: Builder, op: Any) -> Any:
    x, settings = b.data([1, 2, 4, 4]), ([2, 2], [2, 2], [0, 0], False, True, None)
    return b.call(op, silent(b, [1, 2, 2, 2]), x, *(() if "adaptive" in str(op) else settings))


@case("aten.unfold_backward.default")
def unfold_backward(b: Builder, op: Any) -> Any:
    return b.call(op, silent(b, [2, 2, 2]), [2, 3], 1, 2, 1)


@case("aten.glu_backward.default")
def glu_backward(b: Builder, op: Any) -> Any:
    return b.call(op, silent(b, [3, 2]), b.data([3, 4]), 1)


@case("aten._prelu_kernel_backward.default")
def prelu_backward(b: Builder, op: Any) -> Any:
    return b.call(op, silent(b, [3, 2]), b.data([3, 2]), b.data([3, 2]))


@case("aten.convolution_backward.default")
def convolution_backward(b: Builder, op: Any) -> Any:
    x, weight = b.data([1, 2, 5]), b.data([3, 2, 3])
    return b.call(op, silent(b, [1, 3, 3]), x, weight, [3], [1], [0], [1], False, [0], 1, [True, True, True])


@case("aten.reflection_pad1d_backward.default", "aten.replication_pad1d_backward.default")
def pad1d_backward(b: Builder, op: Any) -> Any:
    return b.call(op, silent(b, [1, 2, 6]), b.data([1, 2, 4]), [1, 1])


@case("aten.reflection_pad2d_backward.default", "aten.replication_pad2d_backward.default")
def pad2d_backward(b: Builder, op: Any) -> Any:
    return b.call(op, silent(b, [1, 2, 6, 6]), b.data([1, 2, 4, 4]), [1, 1, 1, 1])
