"""Small programs for one rule each, and what it must derive of them; `hostile_snippets` has those that tempt one."""

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
