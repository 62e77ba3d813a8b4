"""Each rule by itself: what it derives, what it must not, and random operands against what the operator computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import sympy
import torch

import gradprune.passes.rules
from gradprune import prove
from gradprune.passes import registry
from gradprune.passes.affine import Atom, flattened, groups_of
from gradprune.passes.domain import Key, Known
from gradprune.passes.flow import Clause
from gradprune.passes.transfer import broadcast
from tests.passes.builder import Builder, aten
from tests.passes.catalogue import CASES, UNTRIED
from tests.passes.claims import Unsound
from tests.passes.hostile_snippets import HOSTILE
from tests.passes.snippets import DERIVED, small

# -- what a rule derives, and its hostile twin ---------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_claims_nothing_false_of(name: str) -> None:
    b = small()
    HOSTILE[name](b)
    assert b.check() > 0


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


def test_closes_no_claims_that_differ() -> None:
    """Zero where one factor is and one where the other is does not make a constant."""
    clause, (row,) = Clause({"a": (0,), "m": (0,)}), groups_of([3])
    a, m = (Key(factor, (flattened(row),)) for factor in "am")
    assert [known.value for known, _ in clause.covers({a: Known(0), m: Known(0)})] == [0]
    assert not list(clause.covers({a: Known(0), m: Known(1)}))


def test_refuses_sizes_that_may_be_broadcast() -> None:
    """Where k is 1, the first element of the mask multiplies every advantage."""

    def loss(x, adv, mask, k):
        return (x * adv * mask[: k.item()]).sum()

    inputs = {"x": torch.ones(4, requires_grad=True), "adv": torch.ones(4), "mask": torch.tensor([1.0, 0, 0, 0])}
    inputs["adv"][0] = 0
    (gradient,) = torch.autograd.grad(loss(**inputs, k=torch.tensor(1)), inputs["x"])
    assert gradient.any()
    assert not prove(loss, {**inputs, "k": torch.tensor(4)}, zero="adv * mask", wrt="x")


def test_forgets_positions_in_sizes_that_may_be_broadcast() -> None:
    few, many = (Atom(sympy.Symbol("u0", integer=True)),), (Atom(sympy.Symbol("s0", integer=True)),)
    (dims,), mappings = broadcast([many[0].size], [[few], [many]])
    assert dims not in (few, many)
    assert mappings == [{few[0]: None}, {many[0]: None}]


def test_refuses_positions_drawn_twice() -> None:
    def loss(x, adv, mask):
        return (x * adv[torch.randperm(4)] * mask[torch.randperm(4)]).sum()

    def drawn_once(x, adv, mask):
        order = torch.randperm(4)
        return (x * adv[order] * mask[order]).sum()

    inputs = (torch.ones(4), torch.ones(4), torch.zeros(4))
    assert prove(drawn_once, inputs, zero="adv * mask", wrt="x")
    assert not prove(loss, inputs, zero="adv * mask", wrt="x")


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
