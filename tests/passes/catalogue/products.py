"""Matrix products, and tensors made from numbers."""

from __future__ import annotations

from typing import Any

import torch

from tests.passes.builder import NUMBERS, Builder, aten
from tests.passes.catalogue.cases import case


@case("aten.mm.default")
def mm(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.call(aten.t.default, b.start()))


@case("aten.bmm.default")
def bmm(b: Builder, op: Any) -> Any:
    x, y = (b.call(aten.unsqueeze.default, b.start(), b.pick((0, 2))) for _ in range(2))
    if b.shape(x)[0] != b.shape(y)[0]:
        return None
    return b.call(op, x, b.call(aten.transpose.int, y, 1, 2)) if b.shape(x)[2] == b.shape(y)[2] else None


@case("aten.mv.default")
def mv(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.call(aten.select.int, b.start(), 0, 0)) if b.rows else None


@case("aten.dot.default", "aten.vdot.default")
def dot(b: Builder, op: Any) -> Any:
    x, y = (b.call(aten.reshape.default, b.start(), [b.rows * b.tokens]) for _ in range(2))
    return b.call(op, x, y)


@case("aten.addmm.default")
def addmm(b: Builder, op: Any) -> Any:
    base = b.call(aten.expand.default, b.call(aten.full.default, [], b.pick((0.0, 1.0))), [b.rows, b.rows])
    return b.call(op, base, b.start(), b.call(aten.t.default, b.start()), beta=b.pick((1, 0)), alpha=b.pick((1, 2)))


@case("aten.baddbmm.default", "aten.addbmm.default")
def baddbmm(b: Builder, op: Any) -> Any:
    x, y = (b.call(aten.unsqueeze.default, node, 0) for node in (b.start(), b.call(aten.t.default, b.start())))
    shape = [b.rows, b.rows] if "addbmm" in str(op) and "badd" not in str(op) else [1, b.rows, b.rows]
    return b.call(op, b.call(aten.full.default, shape, b.pick((0.0, 1.0))), x, y)


@case("aten.addmv.default")
def addmv(b: Builder, op: Any) -> Any:
    vector = b.call(aten.select.int, b.start(), 0, 0) if b.rows else None
    return b.call(op, b.call(aten.full.default, [b.rows], 0.0), b.start(), vector) if vector else None


@case("aten.linear.default")
def linear(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.start(), b.pick((None, b.call(aten.full.default, [b.rows], 0.0))))


@case("aten.matmul.default")
def matmul(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.call(aten.t.default, b.start()))


@case("aten.full.default", "aten.full_like.default", "aten.fill.Scalar")
def full(b: Builder, op: Any) -> Any:
    return b.call(op, [2, 3] if "full.default" in str(op) else b.start(), b.pick(NUMBERS))


@case("aten.fill.Tensor")
def fill(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.call(aten.full.default, [], b.pick(NUMBERS)))


@case("aten.new_full.default")
def new_full(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), [2, 2], b.pick(NUMBERS))


@case("aten.zeros.default", "aten.ones.default", "aten.rand.default")
def made(b: Builder, op: Any) -> Any:
    return b.call(op, [2, 3])


@case("aten.zeros_like.default", "aten.ones_like.default", "aten.zero.default", "aten.rand_like.default")
def made_like(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand())


@case("aten.new_zeros.default", "aten.new_ones.default")
def new(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand(), [3])


@case("aten.scalar_tensor.default")
def scalar_tensor(b: Builder, op: Any) -> Any:
    return b.call(op, b.pick(NUMBERS), dtype=b.pick((torch.float32, torch.float16, torch.float64)))


@case("aten.bernoulli.default", "aten.bernoulli.p")
def bernoulli(b: Builder, op: Any) -> Any:
    if str(op).endswith("p"):
        return b.call(op, b.start(), 0.5)
    return b.call(op, b.call(aten.sigmoid.default, b.call(aten.nan_to_num.default, b.start())))


@case("aten.eye.default", "aten.eye.m")
def eye(b: Builder, op: Any) -> Any:
    return b.call(op, 3) if str(op).endswith("default") else b.call(op, 2, 3)


@case("aten.native_dropout.default")
def dropout(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand(), b.pick((0.0, 0.5)), True)
