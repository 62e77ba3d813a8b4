"""Reading and writing at positions that are data."""

from __future__ import annotations

from typing import Any

import torch

from tests.passes.builder import Builder, aten
from tests.passes.catalogue.cases import case


@case("aten.gather.default")
def gather(b: Builder, op: Any) -> Any:
    x, dim = b.start(), b.pick((0, 1, -1))
    size = (b.rows, b.tokens)[dim]
    shape = [b.rows, b.tokens]
    shape[dim] = b.pick((1, 2, 4))
    other = 1 - dim % 2
    shape[other] = b.random.randint(0, shape[other])
    return b.call(op, x, dim, b.index(shape, size)) if size else None


@case("aten.index_select.default")
def index_select(b: Builder, op: Any) -> Any:
    dim = b.pick((0, 1, -1))
    size = (b.rows, b.tokens)[dim]
    return b.call(op, b.start(), dim, b.index([b.pick((1, 2, 5))], size)) if size else None


@case("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(b: Builder, op: Any) -> Any:
    x = b.start()
    if b.random.random() < 0.5 and "unsafe" not in str(op):
        mask = b.boolean(b.pick((x, b.start())))
        return b.call(op, x, [mask])
    if 0 in b.shape(x):
        return None
    rows, columns = b.index([2], b.rows), b.index([2], b.tokens)
    if b.random.random() < 0.3:
        x = b.call(aten.expand.default, b.call(aten.unsqueeze.default, x, 1), [b.rows, 2, b.tokens])
        return b.call(op, x, b.pick(([rows, None, columns], [None, None, columns], [rows])))
    return b.call(op, x, b.pick(([rows], [None, columns], [rows, columns])))


@case("aten.masked_select.default")
def masked_select(b: Builder, op: Any) -> Any:
    x, y = b.together(2)
    return b.call(op, x, b.boolean(y))


@case("aten.embedding.default")
def embedding(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.index([2, 2], b.rows)) if b.rows else None


@case("aten.take.default")
def take(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.index([3], b.rows * b.tokens)) if b.rows else None


@case("aten.scatter.src", "aten.scatter_add.default", "aten.scatter_reduce.two", "aten.scatter.reduce")
def scatter(b: Builder, op: Any) -> Any:
    x, dim = b.start(), b.pick((0, 1, -1))
    shape = [b.rows, b.tokens]
    if not shape[dim]:
        return None
    source = b.start()
    shape[1 - dim % 2] = b.random.randint(0, shape[1 - dim % 2])
    if "add" not in str(op) and "reduce" not in str(op):
        order = torch.randperm(shape[dim])[:1]
        positions = order.expand(shape[0], 1) if dim % 2 == 1 else order.expand(shape[1], 1).t()
        return b.call(op, x, dim, b._placeholder(f"index{len(b.values)}", positions.contiguous(), None), source)
    positions = b.index(shape, (b.rows, b.tokens)[dim])
    if str(op).endswith("two"):
        return b.call(op, x, dim, positions, source, b.pick(("sum", "amax", "amin", "mean", "prod")),
                      include_self=b.pick((True, False)))  # fmt: skip
    return b.call(op, x, dim, positions, source, **({"reduce": "add"} if "reduce" in str(op) else {}))


@case("aten.scatter.value", "aten.scatter.value_reduce")
def scatter_number(b: Builder, op: Any) -> Any:
    x, dim = b.start(), b.pick((0, 1))
    if not b.shape(x)[dim]:
        return None
    number = b.pick((0.0, 1.0))
    mode = {"reduce": "add"} if "reduce" in str(op) else {}
    return b.call(op, x, dim, b.index([1, 1] if b.rows else [0, 0], b.shape(x)[dim]), number, **mode)


@case("aten.index_add.default", "aten.index_copy.default", "aten.index_reduce.default")
def index_add(b: Builder, op: Any) -> Any:
    x, dim = b.start(), b.pick((0, 1))
    size = b.shape(x)[dim]
    order = b._placeholder(f"index{len(b.values)}", torch.randperm(size, generator=b.generator), None)
    mode = ["mean"] if "reduce" in str(op) else []
    return b.call(op, x, dim, order, b.start(), *mode)


@case("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(b: Builder, op: Any) -> Any:
    x = b.start()
    number: Any = b.pick((0.0, 1.0))
    if "Tensor" in str(op):
        number = b.call(aten.full.default, [], number)
    return b.call(op, x, 1, b.index([1], b.tokens), number)


@case("aten.slice_scatter.default")
def slice_scatter(b: Builder, op: Any) -> Any:
    x, source = b.start(), b.start()
    dim, start = b.pick((0, 1)), b.pick((None, 0, 1, -1, -9))
    end, step = b.pick((None, 2, -1, 2**63 - 1)), b.pick((1, 1, 2))
    part = b.call(aten.slice.Tensor, source, dim, start, end, step)
    if b.random.random() < 0.5:  # the same positions, elsewhere read from
        size = b.shape(part)[dim]
        part = b.call(aten.slice.Tensor, source, dim, 0, size)
    return b.call(op, x, part, dim, start, end, step)


@case("aten.slice_backward.default")
def slice_backward(b: Builder, op: Any) -> Any:
    source, dim = b.start(), b.pick((0, 1))
    start = b.pick((0, 1, -1))
    part = b.call(aten.slice.Tensor, source, dim, start, 2**63 - 1, 1)
    return b.call(op, part, [b.rows, b.tokens], dim, start, 2**63 - 1, 1)


@case("aten.select_scatter.default", "aten.select_backward.default")
def select_scatter(b: Builder, op: Any) -> Any:
    x, source, dim = b.start(), b.start(), b.pick((0, 1))
    size = b.shape(x)[dim]
    if not size:
        return None
    place = b.random.randint(-size, size - 1)
    part = b.call(aten.select.int, source, dim, b.random.randint(-size, size - 1))
    if "backward" in str(op):
        return b.call(op, part, [b.rows, b.tokens], dim, place)
    return b.call(op, x, part, dim, place)


@case("aten.diagonal_scatter.default")
def diagonal_scatter(b: Builder, op: Any) -> Any:
    x = b.start()
    return b.call(op, x, b.call(aten.diagonal.default, b.start()))


@case("aten.copy.default")
def copy(b: Builder, op: Any) -> Any:
    target, source = b.together(2)
    if b.random.random() < 0.5:
        target = b.call(aten._to_copy.default, target, dtype=b.pick((torch.float64, torch.bool)))
    if b.shape(source) and b.shape(source)[0] and b.random.random() < 0.4:
        source = b.call(aten.select.int, source, 0, 0)
    return b.call(op, target, source)


@case("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(b: Builder, op: Any) -> Any:
    x, accumulate = b.start(), b.random.random() < 0.5
    if b.random.random() < 0.6:
        mask = b.boolean(b.pick((x, b.start())))
        count = int(b.values[mask].sum())
        written = b.pick((b.call(aten.full.default, [], b.pick((0.0, 1.0))), b.data((count,)), b.data((1,))))
        if b.random.random() < 0.3:
            written = b.call(aten.index.Tensor, b.start(), [mask])
        return b.call(op, x, [mask], written, accumulate)
    if 0 in b.shape(x):
        return None
    if b.random.random() < 0.5:
        return b.call(op, x, [b.index([2], b.rows)], b.call(aten.select.int, b.start(), 0, 0), accumulate)
    return b.call(op, x, [None, b.index([1], b.tokens)], b.call(aten.slice.Tensor, b.start(), 1, 0, 1), accumulate)


@case("aten.masked_scatter.default")
def masked_scatter(b: Builder, op: Any) -> Any:
    x, y, source = b.together(3)
    return b.call(op, x, b.boolean(y), source)


@case("aten.masked_scatter_backward.default")
def masked_scatter_backward(b: Builder, op: Any) -> Any:
    x = b.start()
    return b.call(op, x, b.boolean(b.start()), [b.rows, b.tokens])
