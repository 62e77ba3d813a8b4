"""Small programs for one rule each: what it must derive, and where one with a hole claims something false."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from tests.passes.builder import Builder, Node, aten

INF, NAN = float("inf"), float("nan")


def small() -> Builder:
    """Factors a [2] and m [2, 3] of float32, the product zero, one row of each live; no special numbers in the data."""
    return Builder(_small_seed())


@cache
def _small_seed() -> int:
    return next(seed for seed in range(10_000) if _is_small(Builder(seed)))


def _is_small(b: Builder) -> bool:
    a, m = b.factors["a"], b.factors["m"]
    plain = m.dtype == torch.float32 and a.dim() == 1 and (b.rows, b.tokens) == (2, 3) and not b.rowwise and not b.wild
    return plain and a[0] == 0 and a[1] != 0 and bool(m[0].any()) and not m[0].all()


def data(b: Builder) -> Node:
    return b.data((2, 3))


def column(b: Builder) -> Node:
    return b.call(aten.unsqueeze.default, b.a, 1)


def product(b: Builder) -> Node:
    """Zero by hypothesis, given that both factors are finite."""
    return b.call(aten.mul.Tensor, column(b), b.m)


def constant(b: Builder, number: float) -> Node:
    return b.call(aten.full.default, [2, 3], number)


def at_positions(b: Builder, first: Node, second: Node) -> Node:
    rows = b.call(aten.unsqueeze.default, b.call(aten.index_select.default, b.a, 0, first), 1)
    return b.call(aten.mul.Tensor, rows, b.call(aten.index.Tensor, b.m, [second]))


def gathered_along_tokens(b: Builder, dim: int) -> Node:
    positions = b.index([2, 3], 2)
    spread = b.call(aten.expand.default, column(b), [2, 3])
    return b.call(
        aten.mul.Tensor,
        b.call(aten.gather.default, spread, 1, positions),
        b.call(aten.gather.default, b.m, dim, positions),
    )


def last(b: Builder) -> Node:
    """The last token of the mask [2]."""
    return b.call(aten.select.int, b.m, 1, 2)


def stacked(b: Builder, x: Node, *rows: int) -> Node:
    return b.call(aten.stack.default, [b.call(aten.select.int, x, 0, row) for row in rows])


def joined(b: Builder, *rows: int) -> Node:
    """The mask, its rows cut and joined in this order."""
    parts = [b.call(aten.select.int, b.m, 0, row) for row in rows]
    return b.call(aten.view.default, b.call(aten.cat.default, parts), [2, 3])


def line(b: Builder, x: Node, start: int) -> Node:
    """Three elements of a tensor [2, 3] in one line."""
    flat = b.call(aten.reshape.default, b.call(aten.expand.default, x, [2, 3]), [6])
    return b.call(aten.slice.Tensor, flat, 0, start, start + 3)


def cut(b: Builder, start: int) -> Node:
    return b.call(aten.mul.Tensor, line(b, column(b), start), line(b, b.m, start))


def mask(b: Builder) -> Node:
    return b.call(aten.ne.Scalar, b.m, 0)


def unary(op, **kwargs):
    return lambda b: b.call(op, product(b), **kwargs)


DERIVED: dict[str, tuple[Callable[[Builder], Node], object]] = {
    # name -> program, the constant that its result is known to be (None: nothing may be claimed)
    "zero times data": (lambda b: b.call(aten.mul.Tensor, product(b), data(b)), 0),
    "zero times inf": (lambda b: b.call(aten.mul.Tensor, product(b), constant(b, INF)), None),
    "zero plus zero": (lambda b: b.call(aten.add.Tensor, product(b), product(b)), 0),
    "zero plus data": (lambda b: b.call(aten.add.Tensor, product(b), data(b)), None),
    "zero plus one": (lambda b: b.call(aten.add.Tensor, product(b), 1), 1),
    "zero minus a tenth": (lambda b: b.call(aten.sub.Tensor, product(b), 0.1), None),
    "zero over data": (lambda b: b.call(aten.div.Tensor, product(b), data(b)), 0),
    "zero over zero": (lambda b: b.call(aten.div.Tensor, product(b), product(b)), None),
    "data over zero": (lambda b: b.call(aten.div.Tensor, data(b), product(b)), None),
    "zero to the second": (unary(aten.pow.Tensor_Scalar, exponent=2), 0),
    "zero to the zeroth": (unary(aten.pow.Tensor_Scalar, exponent=0), 1),
    "zero to minus one": (unary(aten.pow.Tensor_Scalar, exponent=-1), None),
    "exp of zero": (unary(aten.exp.default), 1),
    "log of zero": (unary(aten.log.default), -INF),
    "log1p of zero": (unary(aten.log1p.default), 0),
    "root of zero": (unary(aten.sqrt.default), 0),
    "inverse root of zero": (unary(aten.rsqrt.default), None),
    "reciprocal of zero": (unary(aten.reciprocal.default), None),
    "cosine of zero": (unary(aten.cos.default), 1),
    "sigmoid of zero": (unary(aten.sigmoid.default), 0.5),
    "sign of zero": (unary(aten.sign.default), 0),
    "angle of zero and data": (lambda b: b.call(aten.atan2.default, product(b), data(b)), None),
    "angle of zero and one": (lambda b: b.call(aten.atan2.default, product(b), constant(b, 1.0)), 0),
    "zero above zero": (unary(aten.gt.Scalar, other=0), False),
    "zero at least zero": (unary(aten.ge.Scalar, other=0), True),
    "zero above a tiny number": (unary(aten.gt.Scalar, other=1e-8), False),
    "data equals itself": (lambda b: b.call(aten.eq.Tensor, *[data(b)] * 2), True),
    "data below itself": (lambda b: b.call(aten.lt.Tensor, *[data(b)] * 2), False),
    "zero clamped": (unary(aten.clamp.default, min=-1, max=1), 0),
    "zero clamped to one": (unary(aten.clamp.default, min=1), 1),
    "zero clamped to a tenth": (unary(aten.clamp.default, min=0.1), None),
    "larger of zero and zero": (lambda b: b.call(aten.maximum.default, product(b), product(b)), 0),
    "larger of zero and data": (lambda b: b.call(aten.maximum.default, product(b), data(b)), None),
    "smaller of zero and a square": (
        lambda b: b.call(aten.minimum.default, product(b), b.call(aten.pow.Tensor_Scalar, data(b), 2)),
        0,
    ),
    "where false picks zero": (
        lambda b: b.call(aten.where.self, b.call(aten.gt.Scalar, product(b), 0), data(b), constant(b, 0.0)),
        0,
    ),
    "where true picks data": (
        lambda b: b.call(aten.where.self, b.call(aten.ge.Scalar, product(b), 0), data(b), constant(b, 0.0)),
        None,
    ),
    "unpicked NaN": (
        lambda b: b.call(aten.where.self, b.call(aten.gt.Scalar, product(b), 0), constant(b, NAN), constant(b, 0.0)),
        0,
    ),
    "masked data times a": (
        lambda b: b.call(aten.mul.Tensor, b.call(aten.where.self, mask(b), data(b), constant(b, 0.0)), column(b)),
        0,
    ),
    "a rolled away from its mask": (
        lambda b: b.call(aten.mul.Tensor, b.call(aten.roll.default, column(b), [1], [0]), b.m),
        None,
    ),
    "a flipped away from its mask": (
        lambda b: b.call(aten.mul.Tensor, b.call(aten.flip.default, column(b), [0]), b.m),
        None,
    ),
    "both flipped": (
        lambda b: b.call(
            aten.mul.Tensor, b.call(aten.flip.default, column(b), [0]), b.call(aten.flip.default, b.m, [0])
        ),
        0,
    ),
    "both flattened": (
        lambda b: b.call(
            aten.mul.Tensor,
            b.call(aten.reshape.default, b.call(aten.expand.default, column(b), [2, 3]), [6]),
            b.call(aten.reshape.default, b.m, [6]),
        ),
        0,
    ),
    "mask reshaped without transposing back": (
        lambda b: b.call(
            aten.mul.Tensor,
            column(b),
            b.call(aten.reshape.default, b.call(aten.transpose.int, b.m, 0, 1), [2, 3]),
        ),
        None,
    ),
    "mask of the first token only": (
        lambda b: b.call(aten.mul.Tensor, column(b), b.call(aten.slice.Tensor, b.m, 1, 0, 1)),
        0,
    ),
    "a times sum of mask": (
        lambda b: b.call(aten.mul.Tensor, b.a, b.call(aten.sum.dim_IntList, b.m, [1])),
        0,
    ),
    "a times sum of mask over rows": (
        lambda b: b.call(aten.mul.Tensor, column(b), b.call(aten.sum.dim_IntList, b.m, [0])),
        None,
    ),
    "sum of zeros": (unary(aten.sum.default), 0),
    "mean of zeros": (unary(aten.mean.default), 0),
    "mean of no zeros": (
        lambda b: b.call(aten.mean.default, b.call(aten.slice.Tensor, product(b), 1, 3, 9)),
        None,
    ),
    "deviation of zeros": (unary(aten.std.correction, correction=1), 0),
    "deviation of one zero": (
        lambda b: b.call(
            aten.std.correction,
            b.call(aten.slice.Tensor, b.call(aten.slice.Tensor, product(b), 0, 0, 1), 1, 0, 1),
            correction=1,
        ),
        None,
    ),
    "largest of ones": (lambda b: b.call(aten.amax.default, b.call(aten.exp.default, product(b))), 1),
    "sum of ones": (lambda b: b.call(aten.sum.default, b.call(aten.exp.default, product(b))), None),
    "norm of zeros": (unary(aten.linalg_vector_norm.default), 0),
    "running sum of zeros": (unary(aten.cumsum.default, dim=1), 0),
    "running product of ones": (
        lambda b: b.call(aten.cumprod.default, b.call(aten.exp.default, product(b)), dim=1),
        None,
    ),
    "softmax of zeros": (unary(aten._softmax.default, dim=1, half_to_float=False), None),
    "sorted zeros": (lambda b: b.item(b.call(aten.sort.default, product(b)), 0), 0),
    "where they were": (lambda b: b.item(b.call(aten.sort.default, product(b)), 1), None),
    "zeros side by side": (lambda b: b.call(aten.cat.default, [product(b), product(b)], 1), 0),
    "zeros beside data": (lambda b: b.call(aten.cat.default, [product(b), data(b)], 1), None),
    "zeros padded with ones": (unary(aten.constant_pad_nd.default, pad=[1, 0], value=1.0), None),
    "selected by the mask, times nothing": (lambda b: b.call(aten.index.Tensor, data(b), [mask(b)]), None),
    "selected where the mask silences a": (
        lambda b: b.call(
            aten.index.Tensor,
            b.call(aten.mul.Tensor, b.call(aten.expand.default, column(b), [2, 3]), data(b)),
            [mask(b)],
        ),
        0,
    ),
    "put where the mask is": (
        lambda b: b.call(
            aten.mul.Tensor,
            b.call(aten.index_put.default, constant(b, 0.0), [mask(b)], b.call(aten.full.default, [], 2.0)),
            column(b),
        ),
        0,
    ),
    "put where the mask is not": (
        lambda b: b.call(
            aten.mul.Tensor,
            b.call(
                aten.index_put.default,
                constant(b, 0.0),
                [b.call(aten.eq.Scalar, b.m, 0)],
                b.call(aten.full.default, [], 2.0),
            ),
            column(b),
        ),
        None,
    ),
    "gathered zeros": (lambda b: b.call(aten.gather.default, product(b), 1, b.index([2, 3], 3)), 0),
    "scattered zeros on ones": (
        lambda b: b.call(aten.scatter_add.default, constant(b, 1.0), 1, b.index([2, 3], 3), product(b)),
        None,
    ),
    "matrix product with zeros": (lambda b: b.call(aten.mm.default, product(b), b.call(aten.t.default, data(b))), 0),
    "both read at the same positions": (lambda b: at_positions(b, x := b.index([4], 2), x), 0),
    "both read at positions that may differ": (lambda b: at_positions(b, b.index([4], 2), b.index([4], 2)), None),
    "both gathered along tokens": (lambda b: gathered_along_tokens(b, 1), 0),
    "gathered along rows and tokens": (lambda b: gathered_along_tokens(b, 0), None),
    "rows cut and stacked": (lambda b: b.call(aten.mul.Tensor, stacked(b, b.a, 0, 1), stacked(b, last(b), 0, 1)), 0),
    "rows stacked in another order": (
        lambda b: b.call(aten.mul.Tensor, stacked(b, b.a, 0, 1), stacked(b, last(b), 1, 0)),
        None,
    ),
    "rows joined and viewed": (lambda b: b.call(aten.mul.Tensor, joined(b, 0, 1), column(b)), 0),
    "rows joined in another order and viewed": (lambda b: b.call(aten.mul.Tensor, joined(b, 1, 0), column(b)), None),
    "a line cut at rows": (lambda b: cut(b, 3), 0),
    "a line cut within rows": (lambda b: b.call(aten.mul.Tensor, line(b, column(b), 2), line(b, b.m, 3)), None),
    "zeros as integers": (unary(aten._to_copy.default, dtype=torch.int64), 0),
    "negative infinity as integers": (
        lambda b: b.call(aten._to_copy.default, b.call(aten.log.default, product(b)), dtype=torch.int64),
        None,
    ),
    "zeros dropped out": (lambda b: b.item(b.call(aten.native_dropout.default, product(b), 0.5, True), 0), 0),
}


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
