"""Operators that rearrange elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.passes.builder import Builder, aten
from tests.passes.catalogue.cases import case, dim_of

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
