"""How to apply each operator that has a rule to random operands of a `Builder`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gradprune.passes.registry import rules
from gradprune.passes.rules.backward import ELEMENTWISE, OVERFLOWING, SELECTING
from gradprune.passes.rules.compare import _OVERLOADS as COMPARISONS
from gradprune.passes.rules.opaque import OPAQUE
from gradprune.passes.rules.unary import FUNCTIONS
from tests.passes.builder import NUMBERS, Builder, Node, aten

Case = Callable[[Builder], Any]
CASES: dict[str, Case] = {}


def operator_of(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def case(*names: str) -> Callable[[Callable[[Builder, Any], Any]], Any]:
    def register(apply: Callable[[Builder, Any], Any]) -> Any:
        for name in names:
            CASES[name] = lambda b, op=operator_of(name): apply(b, op)
        return apply

    return register


def dim_of(b: Builder, node: Node) -> int:
    rank = max(len(b.shape(node)), 1)
    return b.random.randint(-rank, rank - 1)


# -- pointwise ---------------------------------------------------------------------------------------------------

BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default fmax.default"
    " fmin.default remainder.Tensor fmod.Tensor xlogy.Tensor special_xlog1py.default atan2.default hypot.default"
    " copysign.Tensor heaviside.default rsub.Tensor logical_and.default logical_or.default logical_xor.default"
    " pow.Tensor_Tensor floor_divide.default"
)
WITH_NUMBER = (
    "add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar remainder.Scalar fmod.Scalar pow.Tensor_Scalar"
    " copysign.Scalar xlogy.Scalar_Other clamp_min.default clamp_max.default"
)


@case(*(f"aten.{name}" for name in BINARY.split()))
def binary(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    if b.random.random() < 0.1:
        y = x
    return b.call(op, x, y)


@case(*(f"aten.{name}" for name in WITH_NUMBER.split()))
def with_number(b: Builder, op: Any) -> Any:
    number = b.pick((*NUMBERS, math.inf)) if "pow" not in str(op) else b.pick((0, 1, 2, 3, -1, 0.5, -0.5, 1.0))
    return b.call(op, b.operand(), number)


@case(*COMPARISONS)
def comparison(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    if str(op).endswith("Scalar"):
        return b.call(op, x, b.pick((*NUMBERS, math.inf)))
    return b.call(op, x, x if b.random.random() < 0.2 else y)


@case("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.floor_divide.Scalar")
def rounded_division(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    divisor = y if "Tensor" in str(op) else b.pick((1, 2, -3, 0.5))
    mode = {"rounding_mode": b.pick(("floor", "trunc", None))} if "mode" in str(op) else {}
    return b.call(op, x, divisor, **mode)


@case("aten.pow.Scalar")
def number_to_power(b: Builder, op: Any) -> Any:
    return b.call(op, b.pick((0, 1, 2, 0.5)), b.operand())


@case("aten.addcmul.default", "aten.addcdiv.default")
def fused(b: Builder, op: Any) -> Any:
    return b.call(op, *b.broadcastable(3), value=b.pick((1, 2, 0.1, -1)))


@case("aten.lerp.Scalar", "aten.lerp.Tensor")
def interpolation(b: Builder, op: Any) -> Any:
    x, y, w = b.together(3)
    return b.call(op, x, y, w if "Tensor" in str(op) else b.pick((0.0, 0.3, 1.0)))


@case("aten.where.self")
def where(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    return b.call(op, b.boolean(b.pick((x, y))), x, y)


@case("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(b: Builder, op: Any) -> Any:
    x, y = b.together(2)
    number = b.pick((0.0, 1.0, -math.inf))
    return b.call(op, x, b.boolean(y), number if "Scalar" in str(op) else b.call(aten.full.default, [], number))


@case("aten.clamp.default", "aten.hardtanh.default")
def clamp(b: Builder, op: Any) -> Any:
    low, high = b.pick(((None, 1.2), (0, None), (0.8, 1.28), (-1, 1), (-0.5, 0), (1, None), (2, 1)))
    if "hardtanh" in str(op):
        return b.call(op, b.operand(), -1, 1)
    return b.call(op, b.operand(), low, high)


@case("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor")
def clamp_by_tensors(b: Builder, op: Any) -> Any:
    x, low, high = b.together(3)
    return b.call(op, x, low, high) if "clamp.Tensor" in str(op) else b.call(op, x, low)


@case(*(f"aten.{name}.default" for name in FUNCTIONS))
def unary(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand())


@case(
    "aten.neg.default",
    "aten.reciprocal.default",
    "aten.rsqrt.default",
    "aten.logical_not.default",
    "aten.isnan.default",
    "aten.isinf.default",
    "aten.isposinf.default",
    "aten.isneginf.default",
    "aten.isfinite.default",
    "aten.nan_to_num.default",
)
def one_operand(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand())


@case("aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor", "aten.bitwise_xor.Tensor")
def bitwise(b: Builder, op: Any) -> Any:
    if b.random.random() < 0.3:
        return b.call(op, b.integer(), b.call(aten.full.default, [], b.pick((0, 1, 3)), dtype=torch.int64))
    x, y = b.together(2)
    return b.call(op, b.boolean(x), b.boolean(y))


@case("aten.bitwise_and.Scalar", "aten.bitwise_or.Scalar", "aten.bitwise_xor.Scalar")
def bitwise_with_number(b: Builder, op: Any) -> Any:
    return b.call(op, b.integer(), b.pick((0, 1, 6)))


@case("aten.bitwise_not.default")
def bitwise_not(b: Builder, op: Any) -> Any:
    return b.call(op, b.boolean() if b.random.random() < 0.5 else b.integer())


@case("aten._to_copy.default")
def convert(b: Builder, op: Any) -> Any:
    x = b.operand()
    dtype = b.pick((torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.int32, torch.uint8))
    if not dtype.is_floating_point and dtype != torch.bool:
        x = b.call(aten.clamp.default, b.call(aten.nan_to_num.default, x, 0.0, 3.0, -3.0), 0, 100)
    return b.call(op, x, dtype=dtype)


# -- positions ---------------------------------------------------------------------------------------------------

SAME = "alias alias_copy detach detach_copy clone lift_fresh lift_fresh_copy"


@case(*(f"aten.{name}.default" for name in SAME.split()))
def same(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand())


@case("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, b.random.randint(-len(b.shape(x)) - 1, len(b.shape(x))))


@case("aten.squeeze.default", "aten.squeeze_copy.default")
def squeeze(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand())


@case("aten.squeeze.dim", "aten.squeeze_copy.dim", "aten.squeeze.dims", "aten.squeeze_copy.dims")
def squeeze_dim(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dim_of(b, x) if str(op).endswith("dim") else [dim_of(b, x)])


@case("aten.expand.default", "aten.expand_copy.default")
def expand(b: Builder, op: Any) -> Any:
    x = b.call(aten.unsqueeze.default, b.operand(), 0)
    return b.call(op, x, [b.pick((1, 2, 3)), *b.shape(x)[1:]])


@case("aten.permute.default", "aten.permute_copy.default")
def permute(b: Builder, op: Any) -> Any:
    x = b.operand()
    order = list(range(len(b.shape(x))))
    b.random.shuffle(order)
    return b.call(op, x, order)


@case("aten.transpose.int", "aten.transpose_copy.int")
def transpose(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, dim_of(b, x), dim_of(b, x))


@case("aten.t.default", "aten.t_copy.default")
def t(b: Builder, op: Any) -> Any:
    return b.call(op, b.start())


@case("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.view_copy.default",
      "aten._reshape_copy.default")  # fmt: skip
def view(b: Builder, op: Any) -> Any:
    x = b.call(aten.clone.default, b.operand(), memory_format=torch.contiguous_format)
    count = math.prod(b.shape(x))
    splits = [d for d in range(1, count + 1) if count % d == 0] or [1]
    first = b.pick(splits)
    rest = b.pick([d for d in splits if (count // first) % d == 0]) if count else 0
    return b.call(op, x, [first, rest, count // first // rest] if count else [0, 5])


@case("aten.flip.default")
def flip(b: Builder, op: Any) -> Any:
    x = b.operand()
    dims = [place for place in range(len(b.shape(x))) if b.random.random() < 0.6]
    return b.call(op, x, dims)


@case("aten.roll.default")
def roll(b: Builder, op: Any) -> Any:
    x = b.operand()
    if not b.shape(x) or b.random.random() < 0.2:
        return b.call(op, x, [1])
    return b.call(op, x, [b.pick((1, -1, 2))], [dim_of(b, x)])


@case("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(b: Builder, op: Any) -> Any:
    return b.call(op, b.start())


@case("aten.unfold.default", "aten.unfold_copy.default")
def unfold(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), 1, 1, 1)


@case("aten.repeat.default")
def repeat(b: Builder, op: Any) -> Any:
    x = b.operand()
    return b.call(op, x, [b.pick((1, 2)) for _ in range(len(b.shape(x)) + b.pick((0, 1)))])


@case("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(b: Builder, op: Any) -> Any:
    x = b.call(aten.unsqueeze.default, b.operand(), 0)
    end = b.pick((None, 2**63 - 1, -1, 2, 1))
    return b.call(op, x, dim_of(b, x), b.pick((None, 0, 1, -1, -2, -9, 2)), end, b.pick((1, 1, 2)))


@case("aten.select.int", "aten.select_copy.int")
def select(b: Builder, op: Any) -> Any:
    x = b.call(aten.unsqueeze.default, b.operand(), 0)
    dim = dim_of(b, x)
    size = b.shape(x)[dim]
    return b.call(op, x, dim, b.random.randint(-size, size - 1)) if size else None


@case("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor")
def split(b: Builder, op: Any) -> Any:
    x = b.start()
    return b.call(op, x, b.pick((1, 2)), b.pick((0, 1, -1)))


@case("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default", "aten.unsafe_split_with_sizes.default")
def split_with_sizes(b: Builder, op: Any) -> Any:
    first = b.random.randint(0, b.tokens)
    return b.call(op, b.start(), [first, b.tokens - first], b.pick((1, -1)))


@case("aten.unbind.int", "aten.unbind_copy.int")
def unbind(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.pick((0, 1, -1)))


@case("aten.cat.default")
def cat(b: Builder, op: Any) -> Any:
    parts = b.together(b.pick((1, 2, 3)))
    dim = dim_of(b, parts[0])
    if not b.shape(parts[0]):
        return None
    if b.random.random() < 0.3:
        parts.append(b.call(aten._to_copy.default, b.call(aten.slice.Tensor, parts[0], dim, 0, 1), dtype=torch.int32))
    if b.random.random() < 0.2:
        parts.insert(0, b.data((0,)))
    return b.call(op, parts, dim)


@case("aten.stack.default")
def stack(b: Builder, op: Any) -> Any:
    parts = b.together(b.pick((1, 2, 3)))
    return b.call(op, parts, b.random.randint(-len(b.shape(parts[0])) - 1, len(b.shape(parts[0]))))


@case("aten.constant_pad_nd.default")
def pad(b: Builder, op: Any) -> Any:
    widths = [b.random.randint(0, 2) for _ in range(b.pick((2, 4)))]
    return b.call(op, b.start(), widths, b.pick((0, 0, 1.0)))


@case("aten.tril.default", "aten.triu.default")
def triangle(b: Builder, op: Any) -> Any:
    return b.call(op, b.start(), b.pick((-1, 0, 1)))


# -- data positions ------------------------------------------------------------------------------------------------


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


# -- reductions ------------------------------------------------------------------------------------------------------


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


# -- orders ----------------------------------------------------------------------------------------------------------


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


@case("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim", "aten.mode.default")
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


# -- products --------------------------------------------------------------------------------------------------------


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


# -- created -----------------------------------------------------------------------------------------------------------


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


# -- backward ------------------------------------------------------------------------------------------------------------


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


UNTRIED = {
    # Python functions; conversions and creation of other front ends; numbers that only a trace has
    *(name for name in rules() if not name.startswith("aten.") or name == "aten._local_scalar_dense.default"),
    # no kernel on a CPU, or none that takes these arguments directly
    *(name for name in rules() if "cudnn" in name or "_flash_attention_backward" in name or "efficient" in name),
    "aten._fused_rms_norm_backward.default",
    "aten._reshape_alias.default",
    "aten.addbmm.default",
    "aten.convolution.default",
    "aten._convolution.default",
    "aten.rrelu_with_noise_backward.default",
    "aten.as_strided_scatter.default",
    *OPAQUE,
}
