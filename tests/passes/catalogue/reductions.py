"""Reductions, orders, running sums."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.passes.builder import Builder, Node
from tests.passes.catalogue.cases import case, dim_of


def dims_of(b: Builder, node: Node) -> Any:
    rank = len(b.shape(node))
    chosen = [place for place in range(rank) if b.random.random() < 0.5]
    return b.pick((None, chosen, [place - rank for place in chosen]))


@case("aten.sum.default", "aten.mean.default", "aten.nansum.default", "aten.prod.default", "aten.any.default",
      "aten.all.default", "aten.count_nonzero.default", "aten.median.default", "aten.nanmedian.default")  # fmt: skip
def whole_reduction(b: Builder, op: Any) -> Any:
    x = b.operand() if b.random.random() < 0.8 or "mean" in str(op) or "median" in str(op) else b.boolean()
    return b.call(op, x)


@case("aten.max.default", "aten.min.default")
def whole_extremum(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x) if 0 not in b.shape(x) else None


@case("aten.sum.dim_IntList", "aten.mean.dim", "aten.any.dims", "aten.all.dims")
def partial_reduction(b: Builder, op: Any) -> Any:
    x = b.operand()
    dims = dims_of(b, x)
    if dims == [] and ("any" in str(op) or "all" in str(op)):
        dims = None
    return b.call(op, x, dims, b.pick((True, False)))


@case("aten.amax.default", "aten.amin.default")
def partial_extremum(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dims_of(b, x) or [], b.pick((True, False))) if 0 not in b.shape(x) else None


@case("aten.aminmax.default")
def both_extrema(b: Builder, op: Any) -> Any:
    x = b.operand()
    if 0 in b.shape(x):
        return None
    return b.call(op, x, dim=dim_of(b, x) if b.shape(x) else None, keepdim=b.pick((True, False)))


@case("aten.any.dim", "aten.all.dim", "aten.prod.dim_int")
def one_dim(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dim_of(b, x), b.pick((True, False)))


@case("aten.count_nonzero.dim_IntList")
def count_along(b: Builder, op: Any) -> Any:
    x = b.start()
    return b.call(op, x, [b.pick((0, 1))])


@case("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction")
def spread(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dims_of(b, x), correction=b.pick((0, 1, 2)), keepdim=b.pick((True, False)))


@case("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim")
def norm(b: Builder, op: Any) -> Any:
    x = b.operand()
    order = b.pick((1, 2, 3.0, math.inf)) if 0 not in b.shape(x) else 2
    return b.call(op, x, order, dims_of(b, x) or [], b.pick((True, False)))


@case("aten.norm.Scalar")
def whole_norm(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand(), b.pick((1, 2)))


@case("aten.norm.ScalarOpt_dim_dtype")
def typed_norm(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), 2, [1], False, dtype=torch.float64)


@case("aten.logsumexp.default")
def logsumexp(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), [b.pick((0, 1))], b.pick((True, False))) if b.rows else None


@case("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def softmax(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dim_of(b, x), *([] if "safe" in str(op) else [False]))


@case("aten.sort.default")
def sort(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dim_of(b, x), b.pick((True, False)))


@case("aten.sort.stable")
def stable_sort(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, stable=True, dim=dim_of(b, x), descending=b.pick((True, False)))


@case("aten.topk.default")
def topk(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.random.randint(0, b.tokens), b.pick((1, -1)))


@case("aten.max.dim", "aten.min.dim", "aten.mode.default")
def ranked(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dim_of(b, x), b.pick((True, False))) if 0 not in b.shape(x) else None


@case("aten.kthvalue.default")
def kthvalue(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), 1, 1, b.pick((True, False)))


@case("aten.argmax.default", "aten.argmin.default")
def argmax(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, b.pick((None, dim_of(b, x))), b.pick((True, False))) if 0 not in b.shape(x) else None


@case("aten.cumsum.default", "aten.cumprod.default", "aten.cummax.default", "aten.cummin.default",
      "aten.logcumsumexp.default")  # fmt: skip
def running(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dim_of(b, x))
