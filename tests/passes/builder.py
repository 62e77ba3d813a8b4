"""Small random graphs, evaluated while they are built: operands of every kind of knowledge for one operator."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from gradprune.passes.affine import Affine, flattened, groups_of
from gradprune.passes.domain import Key, Known, Value, unknown
from gradprune.passes.flow import TANGENT, Clause, Flow
from tests.passes.claims import Checker, Node

aten = torch.ops.aten
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, -1e30, 3e38, -3e38, 88.0, 300.0)
BROKEN = (float("inf"), float("-inf"), float("nan"))
NUMBERS = (0, 1, -1, 0.5, 2, 0.25, 1e-8, 1e30, 0.1, 1e39, 1e-50)


class NoShapes:
    """Stands for a shape environment where every size is a number."""

    def is_unbacked_symint(self, symbol: Any) -> bool:
        raise AssertionError("there is no symbol")


class Builder:
    """A graph over factors ``a`` [R] or [R, 1] and ``m`` [R, T], data, and a tangent; values are real tensors."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.graph = torch.fx.Graph()
        self.values: dict[Node, Any] = {}
        self.cotangents: set[Node] = set()
        self.rows, self.tokens = self.random.choice(((2, 3), (3, 3), (3, 2), (1, 3), (3, 1), (2, 2), (4, 6), (0, 2)))
        self.wild = self.random.random() < 0.4
        dtype = self.random.choice((torch.float32,) * 4 + (torch.float64, torch.bfloat16, torch.bool, torch.int64))
        leading = (self.rows, 1) if self.random.random() < 0.3 else (self.rows,)
        a, m = self._factor(leading, torch.float32), self._factor((self.rows, self.tokens), dtype)
        self.rowwise = self.random.random() < 0.5
        if not self.rowwise:
            a = self._silenced(a, m)
        self.factors = {"a": a, "m": m}
        self.sources: dict[Node, Value] = {}
        self.a, self.m = (self._placeholder(name, factor, name) for name, factor in self.factors.items())
        self.tangent = self._placeholder("tangent", torch.tensor(self.pick((1.0, -0.5, 2.0**16, 0.0))), None)
        self.cotangents.add(self.tangent)
        self.clause = Clause({name: _axes(factor) for name, factor in self.factors.items()})

    def pick(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def _factor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.tensor((0.0, 0.0, -0.0, 1.0, 1.0, 2.0, -1.0, 0.5))
        factor = numbers[torch.randint(0, len(numbers), shape, generator=self.generator)]
        return factor.to(dtype)

    def _silenced(self, a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """The first factor, zero wherever the product is not."""
        live = (m != 0).any(1)
        a = a.clone()
        a[live] = 0
        return a

    def _placeholder(self, name: str, value: torch.Tensor, factor: str | None) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.values[node] = value
        claim = unknown(groups_of(value.shape), value.dtype)
        facts: dict[Key, Known] = {}
        if factor is not None:
            facts = {Key(factor, tuple(flattened(g) if g else Affine(0) for g in claim.dims)): Known(0)}
        bounds = (-TANGENT, TANGENT) if name == "tangent" else claim.bounds
        notnan = claim.notnan or name == "tangent"
        self.sources[node] = Value(claim.dims, value.dtype, facts=facts, bounds=bounds, notnan=notnan)
        return node

    def data(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Node:
        value = torch.randn(tuple(shape), generator=self.generator) * self.pick((0.5, 1.0, 5.0))
        special = torch.tensor(SPECIAL + (BROKEN if self.wild else ()))
        chosen = special[torch.randint(0, len(special), tuple(shape), generator=self.generator)]
        value = torch.where(torch.rand(tuple(shape), generator=self.generator) < 0.3, chosen, value)
        if not dtype.is_floating_point:
            value = value.nan_to_num(0, 3, -3).clamp(-9, 9)
        return self._placeholder(f"data{len(self.values)}", value.to(dtype), None)

    def index(self, shape: Sequence[int], below: int) -> Node:
        value = torch.randint(0, max(below, 1), tuple(shape), generator=self.generator)
        return self._placeholder(f"index{len(self.values)}", value, None)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A node and, at once, its value. Forward nodes are results of a call of the program."""
        node = self.graph.call_function(target, args, kwargs)
        real_args, real_kwargs = torch.fx.node.map_arg((args, kwargs), self.values.__getitem__)
        torch.manual_seed(0)
        value = target(*real_args, **real_kwargs)
        node.meta["val"] = self.values[node] = value
        if any(source in self.cotangents for source in node.all_input_nodes):
            self.cotangents.add(node)
        else:
            node.meta["call"] = len(self.values)
        return node

    def item(self, several: Node, place: int) -> Node:
        return self.call(operator.getitem, several, place)

    # -- operands ------------------------------------------------------------------------------------------------

    def shape(self, node: Node) -> tuple[int, ...]:
        return tuple(self.values[node].shape)

    def start(self) -> Node:
        """A float tensor [R, T] about which the analysis knows something, or nothing."""
        return self.pick(
            (
                self._data_start,
                self._factor_start,
                self._scaled_start,
                self._product_start,
                self._filled_start,
                self._complement_start,
                self._constant_start,
                self._number_start,
                self._infinite_start,
                self._cotangent_start,
            )
        )()

    def _data_start(self) -> Node:
        return self.data((self.rows, self.tokens))

    def _spread(self) -> Node:
        """One of the factors as float [R, T]."""
        factor = self.pick((self.a, self.m))
        node = self.call(aten._to_copy.default, factor, dtype=torch.float32)
        if len(self.shape(node)) == 1:
            node = self.call(aten.unsqueeze.default, node, 1)
        return self.call(aten.expand.default, node, [self.rows, self.tokens])

    def _factor_start(self) -> Node:
        return self._spread()

    def _scaled_start(self) -> Node:
        return self.call(aten.mul.Tensor, self._spread(), self._data_start())

    def _product_start(self) -> Node:
        m = self.call(aten._to_copy.default, self.m, dtype=torch.float32)
        a = self.a if len(self.shape(self.a)) == 2 else self.call(aten.unsqueeze.default, self.a, 1)
        return self.call(aten.mul.Tensor, a, m)

    def _filled_start(self) -> Node:
        silent = self.call(aten.eq.Scalar, self._spread(), 0)
        filler = self.call(aten.full.default, [], self.pick((0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"))))
        return self.call(aten.where.self, silent, filler, self._data_start())

    def _complement_start(self) -> Node:
        return self.call(aten.rsub.Scalar, self._spread(), self.pick((1, 0.5, -2)))

    def _constant_start(self) -> Node:
        number = self.pick((0.0, 1.0, -1.0, 0.5, 2.0, 0.1, float("inf"), -float("inf")))
        return self.call(aten.full.default, [self.rows, self.tokens], number)

    def _number_start(self) -> Node:
        """A tensor without dimensions, of float64: it gives way to the dtype of others."""
        number = self.pick((0.0, 1.0, 1e39, 1e-50, -2.0))
        node = self.call(aten.full.default, [], number, dtype=torch.float64)
        return self.call(aten.mul.Tensor, self._data_start(), node)

    def _infinite_start(self) -> Node:
        """0 and -inf, or 0 and inf: never NaN, and known not to be."""
        chance = self.call(aten._to_copy.default, self.call(aten.gt.Scalar, self._data_start(), 0), dtype=torch.float32)
        node = self.call(aten.log.default, chance)
        return node if self.random.random() < 0.5 else self.call(aten.neg.default, node)

    def _cotangent_start(self) -> Node:
        spread = self.call(aten.expand.default, self.tangent, [self.rows, self.tokens])
        return self.call(aten.mul.Tensor, spread, self.start())

    def together(self, count: int) -> list[Node]:
        """Operands of one shape: starts that went through the same views."""
        nodes = [self.start() for _ in range(count)]
        for _ in range(self.pick((0, 0, 1, 1, 2, 3))):
            view = self.pick(VIEWS)(self, self.shape(nodes[0]))
            if view is not None:
                nodes = [view(node) for node in nodes]
        return nodes

    def operand(self) -> Node:
        return self.together(1)[0]

    def broadcastable(self, count: int) -> list[Node]:
        """Operands whose shapes broadcast."""
        nodes = self.together(count)
        for place in range(1, count):
            shape = self.shape(nodes[place])
            if shape and shape[0] and self.random.random() < 0.3:
                nodes[place] = self.call(aten.slice.Tensor, nodes[place], 0, 0, 1)
            elif len(shape) > 1 and shape[0] and self.random.random() < 0.2:
                nodes[place] = self.call(aten.select.int, nodes[place], 0, self.random.randrange(shape[0]))
        return nodes

    def boolean(self, like: Node | None = None) -> Node:
        """A condition of the shape of `like`, with facts or without."""
        source = self.operand() if like is None else like
        if like is not None and self.random.random() < 0.5 and self.shape(like) == (self.rows, self.tokens):
            source = self._spread()
        return self.call(self.pick((aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar)), source, self.pick((0, 1, 0.5)))

    def integer(self) -> Node:
        node = self.operand()
        clean = self.call(aten.nan_to_num.default, node, 0.0, 3.0, -3.0)
        return self.call(aten._to_copy.default, self.call(aten.clamp.default, clean, -9, 9), dtype=torch.int64)

    # -- judging -------------------------------------------------------------------------------------------------

    def flow(self) -> Flow:
        nodes = list(self.graph.nodes)
        backward = frozenset(n for n in nodes if n.op == "call_function" and "call" not in n.meta)
        flow = Flow(
            torch.fx.GraphModule({}, torch.fx.Graph()),
            self.clause,
            self.sources,
            backward,
            frozenset(self.cotangents),
            NoShapes(),
            self.rowwise,
        )
        return flow.run(nodes)

    def check(self) -> int:
        """Check every claim; the number of claims."""
        return Checker(self.flow(), self.values, self.factors).check()


def _axes(factor: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(None if size == 1 else place for place, size in enumerate(factor.shape))


View = Callable[[Node], Node]
Views = Callable[[Builder, tuple[int, ...]], View | None]


def _unsqueeze(b: Builder, shape: tuple[int, ...]) -> View | None:
    dim = b.random.randint(-len(shape) - 1, len(shape))
    return lambda node: b.call(aten.unsqueeze.default, node, dim)


def _flatten(b: Builder, shape: tuple[int, ...]) -> View | None:
    return lambda node: b.call(aten.reshape.default, node, [-1]) if 0 not in shape else node


def _regroup(b: Builder, shape: tuple[int, ...]) -> View | None:
    count = 1
    for size in shape:
        count *= size
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    if not divisors:
        return None
    first = b.pick(divisors)
    return lambda node: b.call(aten.reshape.default, node, [first, count // first])


def _transpose(b: Builder, shape: tuple[int, ...]) -> View | None:
    if len(shape) < 2:
        return None
    first, second = b.random.sample(range(len(shape)), 2)
    return lambda node: b.call(aten.transpose.int, node, first, second - len(shape))


def _slice(b: Builder, shape: tuple[int, ...]) -> View | None:
    if not shape:
        return None
    dim, start = b.random.randrange(len(shape)), b.random.randint(-3, 3)
    end, step = b.pick((9223372036854775807, -1, 2)), b.pick((1, 1, 2))
    return lambda node: b.call(aten.slice.Tensor, node, dim, start, end, step)


def _flip(b: Builder, shape: tuple[int, ...]) -> View | None:
    if not shape:
        return None
    dim = b.random.randrange(len(shape))
    return lambda node: b.call(aten.flip.default, node, [dim])


def _expand(b: Builder, shape: tuple[int, ...]) -> View | None:
    return lambda node: b.call(aten.expand.default, node, [2, *shape])


def _pad(b: Builder, shape: tuple[int, ...]) -> View | None:
    if not shape:
        return None
    before, after = b.random.randint(-1, 2), b.random.randint(-1, 2)
    if shape[-1] + before + after < 0 or shape[-1] + min(before, 0) + min(after, 0) < 0:
        return None
    return lambda node: b.call(aten.constant_pad_nd.default, node, [before, after], b.pick((0.0, 0.0, 1.0)))


VIEWS: tuple[Views, ...] = (_unsqueeze, _flatten, _regroup, _transpose, _slice, _flip, _expand, _pad)
