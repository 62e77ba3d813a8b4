"""Each rule by itself: what it derives, what it must not, and random operands against what the operator computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

import gradprune.passes.rules
from gradprune.passes import registry
from tests.passes.builder import Builder, Node, aten
from tests.passes.catalogue import CASES, UNTRIED
from tests.passes.claims import Unsound

INF, NAN = float("inf"), float("nan")


# -- what a rule derives, and its hostile twin ---------------------------------------------------------------------


def small() -> Builder:
    """Factors a [2] and m [2, 3] of float32, the product zero; no special numbers in the data."""
    seed = next(s for s in range(10_000) if _is_small(Builder(s)))
    return Builder(seed)


def _is_small(b: Builder) -> bool:
    plain = b.factors["m"].dtype == torch.float32 and b.factors["a"].dim() == 1
    return plain and (b.rows, b.tokens) == (2, 3) and not b.rowwise and not b.wild


def data(b: Builder) -> Node:
    return b.data((2, 3))


def column(b: Builder) -> Node:
    return b.call(aten.unsqueeze.default, b.a, 1)


def product(b: Builder) -> Node:
    """Zero by hypothesis, given that both factors are finite."""
    return b.call(aten.mul.Tensor, column(b), b.m)


def constant(b: Builder, number: float) -> Node:
    return b.call(aten.full.default, [2, 3], number)


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
    "zeros as integers": (unary(aten._to_copy.default, dtype=torch.int64), 0),
    "negative infinity as integers": (
        lambda b: b.call(aten._to_copy.default, b.call(aten.log.default, product(b)), dtype=torch.int64),
        None,
    ),
    "zeros dropped out": (lambda b: b.item(b.call(aten.native_dropout.default, product(b), 0.5, True), 0), 0),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derives(name: str) -> None:
    b = small()
    program, expected = DERIVED[name]
    node = program(b)
    value = b.flow().values[node]
    if expected is None:
        assert value.const is None
    else:
        assert value.const is not None
        assert value.const.value == expected
    b.check()


# -- random operands -----------------------------------------------------------------------------------------------


def applies(apply: Callable[[Builder], object], b: Builder) -> bool:
    """Whether the operator could be applied; torch refuses numbers that a dtype cannot hold."""
    try:
        return apply(b) is not None
    except RuntimeError as error:
        if "without overflow" in str(error):
            return False
        raise


def try_rules(rounds: range) -> int:
    """Apply every operator to random operands, once a round. Returns the number of claims, all of them true."""
    claims = 0
    for turn in rounds:
        for name, apply in CASES.items():
            seed = turn * 1_000_003 + sum(map(ord, name))
            b = Builder(seed)
            if not applies(apply, b):
                continue
            try:
                claims += b.check()
            except Unsound as error:
                raise Unsound(f"{name}, seed {seed}: {error}") from error
    return claims


def test_claims_nothing_false_of_random_operands() -> None:
    assert try_rules(range(3)) > 8_000


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", range(10))
def test_claims_nothing_false_in_a_million(share: int) -> None:
    assert try_rules(range(1000 + 20 * share, 1020 + 20 * share)) > 100_000


def test_every_rule_is_tried() -> None:
    assert set(registry.rules()) == CASES.keys() | UNTRIED


# -- the table -----------------------------------------------------------------------------------------------------


def test_every_operator_exists() -> None:
    for name in registry.rules():
        if name.startswith("aten."):
            _, packet, overload = name.split(".")
            assert getattr(getattr(aten, packet), overload)


def test_an_operator_has_one_rule() -> None:
    with pytest.raises(ValueError, match=r"aten\.mul\.Tensor has a rule already: .*multiply"):
        registry.rule("aten.mul.Tensor")(lambda flow, node: None)


def test_rules_are_short() -> None:
    assert gradprune.passes.rules
    for rule in set(registry.rules().values()):
        assert len(inspect.getsource(rule).splitlines()) <= 50, rule.__name__
