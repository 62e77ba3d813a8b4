"""Small programs for one rule each, on which one with a hole claims something false."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.passes.builder import Builder, Node, aten
from tests.passes.snippets import INF, NAN, constant, product


def given(*numbers: float) -> Callable[[Builder], Node]:
    """Data [2, 3] that the analysis knows nothing of."""
    return lambda b: b._placeholder(f"data{len(b.values)}", torch.tensor(numbers).expand(2, 3).contiguous(), None)


nans, zeros, some = given(NAN), given(0.0), given(2.0, -3.0, 0.5)


def given_index(b: Builder, *numbers: int) -> Node:
    return b._placeholder(f"index{len(b.values)}", torch.tensor(numbers), None)


def infinities(b: Builder) -> Node:
    """0 and -inf, known not to be NaN."""
    chance = b.call(aten._to_copy.default, b.call(aten.gt.Scalar, some(b), 0), dtype=torch.float32)
    return b.call(aten.log.default, chance)


def flowing(b: Builder) -> Node:
    return b.call(aten.expand.default, b.tangent, [2, 3])


def silent(b: Builder) -> Node:
    """A cotangent that is zero."""
    return b.call(aten.mul.Tensor, flowing(b), constant(b, 0.0))


def even(b: Builder) -> Node:
    """A cotangent that is one everywhere."""
    return b.call(aten.add.Tensor, silent(b), 1)


def by_two_apart(b: Builder) -> Node:
    """Indices on both sides of a dimension that stays: theirs goes to the front."""
    spread = b.call(aten.expand.default, b.call(aten.view.default, b.a, [2, 1, 1, 1]), [2, 2, 2, 2])
    return b.call(aten.index.Tensor, spread, [None, b.index([2], 2), None, b.index([2], 2)])


def loss_of_classes(b: Builder) -> Node:
    """The gradient of a mean over targets that weigh nothing."""
    total, target = b._placeholder("total", torch.zeros(()), None), b.index([2], 3)
    silent = b.call(aten.mul.Tensor, b.tangent, 0)
    return b.call(aten.nll_loss_backward.default, silent, some(b), target, None, 1, -100, total)


def squared(b: Builder, x: Node) -> Node:
    return b.call(aten.mul.Tensor, x, x)


HOSTILE: dict[str, Callable[[Builder], Node]] = {
    # programs on which a rule with a hole claims something false
    "zero scaled by inf": lambda b: b.call(aten.add.Tensor, constant(b, 0.0), product(b), alpha=INF),
    "inf minus inf": lambda b: b.call(aten.add.Tensor, x := infinities(b), b.call(aten.neg.default, x)),
    "zero times infinities": lambda b: b.call(aten.mul.Tensor, infinities(b), constant(b, 0.0)),
    "square of data": lambda b: squared(b, some(b)),
    "cotangent over zero": lambda b: b.call(aten.div.Tensor, flowing(b), b.call(aten.relu.default, zeros(b))),
    "cotangent over data": lambda b: b.call(aten.div.Tensor, flowing(b), some(b)),
    "cotangent times infinities": lambda b: b.call(aten.mul.Tensor, flowing(b), infinities(b)),
    "zero times log of NaN": lambda b: b.call(aten.xlogy.Tensor, product(b), nans(b)),
    "zero times NaN": lambda b: b.call(aten.mul.Tensor, product(b), nans(b)),
    "zero over NaN": lambda b: b.call(aten.div.Tensor, product(b), nans(b)),
    "zero modulo zero": lambda b: b.call(aten.fmod.Tensor, product(b), zeros(b)),
    "smaller of zero and a NaN": lambda b: b.call(aten.minimum.default, product(b), squared(b, nans(b))),
    "smaller of a NaN and zero": lambda b: b.call(aten.minimum.default, squared(b, nans(b)), product(b)),
    "clamped from below by NaN": lambda b: b.call(aten.clamp.Tensor, some(b), squared(b, nans(b)), product(b)),
    "infinity made a number": lambda b: b.call(aten.nan_to_num.default, b.call(aten.log.default, product(b))),
    "NaN made a number": lambda b: b.call(aten.nan_to_num.default, nans(b), NAN),
    "NaN equals itself": lambda b: b.call(aten.eq.Tensor, x := nans(b), x),
    "NaN differs from itself": lambda b: b.call(aten.ne.Tensor, x := nans(b), x),
    "NaN at most its square": lambda b: b.call(aten.ge.Scalar, squared(b, nans(b)), 0),
    "is NaN": lambda b: b.call(aten.isnan.default, nans(b)),
    "is finite": lambda b: b.call(aten.isfinite.default, infinities(b)),
    "is infinite": lambda b: b.call(aten.isinf.default, infinities(b)),
    "log of negative numbers": lambda b: b.call(aten.log.default, b.call(aten.clamp.default, some(b), -2, -1)),
    "sine of infinity": lambda b: b.call(aten.sin.default, infinities(b)),
    "inverse of a negative zero": lambda b: b.call(aten.reciprocal.default, squared(b, given(-0.0)(b))),
    "inverse root of a negative zero": lambda b: b.call(
        aten.rsqrt.default, b.call(aten.clamp.default, given(-0.0)(b), 0)
    ),
    "root of a square": lambda b: b.call(aten.sqrt.default, squared(b, some(b))),
    "angle of a negative zero": lambda b: b.call(aten.atan2.default, product(b), constant(b, -0.0)),
    "step at zero": lambda b: b.call(aten.heaviside.default, product(b), constant(b, 0.5)),
    "NaN as an integer": lambda b: b.call(
        aten._to_copy.default, b.call(aten.clamp.default, nans(b), 0, 1), dtype=torch.int32
    ),
    "infinity as an integer": lambda b: b.call(aten._to_copy.default, infinities(b), dtype=torch.int64),
    "too large for half": lambda b: b.call(aten._to_copy.default, constant(b, 1e30), dtype=torch.float16),
    "too small for half": lambda b: b.call(
        aten.gt.Scalar, b.call(aten._to_copy.default, constant(b, 1e-30), dtype=torch.float16), 0
    ),
    "sum of ones": lambda b: b.call(aten.sum.default, b.call(aten.exp.default, product(b))),
    "sum of infinities": lambda b: b.call(
        aten.sum.default, b.call(aten.cat.default, [x := infinities(b), b.call(aten.neg.default, x)])
    ),
    "sum of negative numbers": lambda b: b.call(aten.sum.dim_IntList, b.call(aten.clamp.default, some(b), -3, -1), [1]),
    "sum of no negative number": lambda b: b.call(
        aten.sum.dim_IntList, b.call(aten.slice.Tensor, b.call(aten.clamp.default, some(b), -3, -1), 1, 3, 9), [1]
    ),
    "all of no number": lambda b: b.call(aten.all.dim, b.call(aten.slice.Tensor, product(b), 1, 3, 9), 1),
    "any of ones": lambda b: b.call(aten.any.default, b.call(aten.exp.default, product(b))),
    "product of no zero": lambda b: b.call(aten.prod.dim_int, b.call(aten.slice.Tensor, product(b), 1, 3, 9), 1),
    "product of ones": lambda b: b.call(aten.prod.default, b.call(aten.exp.default, product(b))),
    "running sum of ones": lambda b: b.call(aten.cumsum.default, b.call(aten.exp.default, product(b)), 1),
    "running sum of a mask": lambda b: b.call(aten.cumsum.default, b.m, 1),
    "ones beside zeros": lambda b: b.call(aten.cat.default, [b.call(aten.exp.default, product(b)), product(b)]),
    "triangle of ones": lambda b: b.call(aten.tril.default, b.call(aten.exp.default, product(b))),
    "ones dropped out": lambda b: b.item(
        b.call(aten.native_dropout.default, b.call(aten.exp.default, product(b)), 0.5, True), 0
    ),
    "ones added at positions": lambda b: b.call(
        aten.scatter_add.default, x := b.call(aten.exp.default, product(b)), 1, b.index([2, 3], 3), x
    ),
    "median of an expanded dimension": lambda b: b.item(
        b.call(aten.median.dim, b.call(aten.expand.default, b.call(aten.rsub.Scalar, b.m, 1), [2, 2, 2, 3]), 0), 0
    ),
    "mask moved along tokens": lambda b: b.call(
        aten.scatter.src, constant(b, 0.0), 1, b.index([2, 3], 3), b.call(aten.mul.Tensor, b.m, some(b))
    ),
    "products at positions": lambda b: b.call(
        aten.scatter_reduce.two, product(b), 1, b.index([2, 3], 3), some(b), "prod", include_self=False
    ),
    "matrix product with NaN": lambda b: b.call(aten.mm.default, product(b), b.call(aten.t.default, nans(b))),
    "matrix product of masks with NaN": lambda b: b.call(aten.mm.default, b.m, b.call(aten.t.default, nans(b))),
    "matrix product with ones": lambda b: b.call(
        aten.mm.default, b.call(aten.exp.default, product(b)), b.call(aten.t.default, some(b))
    ),
    "zero times more than a float32": lambda b: b.call(
        aten.mul.Tensor, product(b), b.call(aten.full.default, [], 1e39, dtype=torch.float64)
    ),
    "a third in float32": lambda b: b.call(
        aten.sub.Tensor, b.call(aten.full.default, [2, 3], 1e39, dtype=torch.float64), constant(b, 0.0)
    ),
    "positions of indices apart": by_two_apart,
    "read from the end": lambda b: b.call(aten.index.Tensor, b.m, [given_index(b, -1, 0, -2, 1)]),
    "read from the end of a line": lambda b: b.call(
        aten.index.Tensor, b.call(aten.reshape.default, b.m, [6]), [given_index(b, -1, 0, -5, 3)]
    ),
    "read for all columns at once": lambda b: b.call(
        aten.index.Tensor, b.m, [given_index(b, 0, 1), b._placeholder("rows", torch.tensor([[2], [0]]), None)]
    ),
    "products of minus one": lambda b: b.call(
        aten.scatter_reduce.two, product(b), 1, b.index([2, 3], 3), product(b), "prod", include_self=False
    ),
    "backward of a cotangent of ones": lambda b: b.call(
        aten.reflection_pad1d_backward.default,
        b.call(aten.constant_pad_nd.default, even(b), [1, 1], 1.0),
        some(b),
        [1, 1],
    ),
    "backward of a large tanh": lambda b: b.call(aten.tanh_backward.default, silent(b), given(3e38)(b)),
    "backward of NaN in a softmax": lambda b: b.call(
        aten._log_softmax_backward_data.default, silent(b), nans(b), 1, torch.float32
    ),
    "backward of a mean of no class": loss_of_classes,
    "backward of a slope that is no number": lambda b: b.call(
        aten.leaky_relu_backward.default, silent(b), some(b), NAN, False
    ),
    "backward of a softplus that is none": lambda b: b.call(
        aten.softplus_backward.default, silent(b), some(b), NAN, 20.0
    ),
    "base of a matrix product": lambda b: b.call(
        aten.addmm.default, b.call(aten.full.default, [2, 2], 1.0), product(b), b.call(aten.t.default, some(b))
    ),
}
