"""The analysis as a whole: alignment of factors, per-row proofs, sizes, missing rules, input errors, speed."""

from __future__ import annotations

import time

import pytest
import torch

from gradprune.errors import PruneError
from gradprune.facts import Certificate, Hypothesis, Refusal, Verdict
from gradprune.joint import JointGraph
from gradprune.passes import registry
from gradprune.passes.domain import unknown
from gradprune.passes.zero_flow import analyse
from gradprune.trace import trace_joint
from tests.passes.test_losses import FACTORS, HYPOTHESIS, traced


def trace(loss, **inputs: torch.Tensor) -> JointGraph:
    return trace_joint(loss, tuple(inputs.values()), names=tuple(inputs), wrt=(next(iter(inputs)),))[0]


def judge(loss, zero: str, **inputs: torch.Tensor) -> Verdict:
    hypothesis = Hypothesis.parse(zero)
    factors = {factor: factor for factor in hypothesis.factors if factor in inputs}
    return analyse(trace(loss, **inputs), factors, hypothesis=hypothesis)


X, ROW, COLUMN, TOKEN = torch.randn(4, 3), torch.randn(4), torch.randn(4, 1), torch.randn(4, 3)


def product(x, a, m):
    return (x * a.reshape(a.shape[0], -1) * m).sum()


@pytest.mark.parametrize("a", [ROW, COLUMN, TOKEN], ids=["R", "R1", "RT"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_proves_factors_of_any_rank_and_dtype(a: torch.Tensor, dtype: torch.dtype) -> None:
    assert judge(product, "a * m", x=X, a=a, m=TOKEN.to(dtype))


def test_proves_one_number_for_all_rows() -> None:
    assert judge(lambda x, a, m: (x * a * m).sum(), "a * m", x=X, a=torch.ones(1), m=TOKEN)


def test_proves_three_factors() -> None:
    assert judge(lambda x, a, b, m: (x * a[:, None] * b * m).sum(), "a * b * m", x=X, a=ROW, b=COLUMN, m=TOKEN)


def test_keeps_loss_without_the_third_factor() -> None:
    assert not judge(lambda x, a, b, m: (x * a[:, None] * m).sum(), "a * b * m", x=X, a=ROW, b=COLUMN, m=TOKEN)


def test_proves_with_a_factor_that_is_enough_by_itself() -> None:
    assert judge(lambda x, a: (x * a[:, None]).sum(), "a", x=X, a=ROW)


def test_keeps_loss_whose_factor_is_not_read() -> None:
    assert not judge(lambda x, a: (x * a[:, None]).sum(), "a * m", x=X, a=ROW)


def test_proves_rows_of_which_all_tokens_are_masked() -> None:
    """For all t: a(r) or m(r, t) is: a(r), or for all t: m(r, t)."""
    assert judge(lambda x, a, m: (x[:, 0] * a * m.sum(1)).sum(), "a * m", x=X, a=ROW, m=TOKEN)


def test_keeps_sums_that_lose_the_token() -> None:
    assert not judge(lambda x, a, m: (x[:, 0] * a.sum(1) * m.sum(1)).sum(), "a * m", x=X, a=TOKEN, m=TOKEN)


def test_keeps_trailing_alignment() -> None:
    """A vector that broadcasts against tokens is not a factor of rows, equal sizes or not."""
    square = torch.randn(4, 4)
    assert not judge(lambda x, a, m: (x * a * m).sum(), "a * m", x=square, a=ROW, m=torch.randn(4, 4))
    assert judge(lambda x, a, m: (x * a[:, None] * m).sum(), "a * m", x=square, a=ROW, m=torch.randn(4, 4))


def test_keeps_transposed_mask_of_a_square() -> None:
    square = torch.randn(4, 4)
    assert not judge(lambda x, a, m: (x * a * m.t()).sum(), "a * m", x=square, a=square.clone(), m=square.clone())


def test_keeps_gradient_of_state() -> None:
    """A tensor from a closure is unknown, whatever it holds now."""
    weight = torch.zeros(4)
    assert not judge(lambda x, a: (x * weight[:, None]).sum(), "a", x=X, a=ROW)
    assert judge(lambda x, a: (x * weight[:, None] * a[:, None]).sum(), "a", x=X, a=ROW)


def test_proves_a_constant_of_the_program() -> None:
    assert judge(lambda x, a: (x * torch.tensor(0.0)).sum(), "a", x=X, a=ROW)
    assert not judge(lambda x, a: (x * torch.tensor(0.5)).sum(), "a", x=X, a=ROW)


def test_says_when_rows_are_apart() -> None:
    apart = judge(lambda x, a: (x * a[:, None]).mean(), "a", x=X, a=ROW)
    coupled = judge(lambda x, a, m: (x * a[:, None]).sum() / m.abs().sum().clamp(min=1), "a", x=X, a=ROW, m=TOKEN)
    assert isinstance(apart, Certificate) and apart.per_row
    assert isinstance(coupled, Certificate) and not coupled.per_row


def test_keeps_rows_that_read_each_other() -> None:
    def neighbours(x, a):
        return (x * a.roll(1)[:, None].abs().clamp(max=0)).sum() + (x * a[:, None] * a.flip(0)[:, None]).sum()

    verdict = judge(neighbours, "a", x=X, a=ROW)
    assert isinstance(verdict, Certificate) and not verdict.per_row


def test_keeps_rows_when_gradient_has_none() -> None:
    verdict = judge(lambda x, a: (x.sum() * a).sum(), "a", x=torch.randn(5), a=ROW)
    assert isinstance(verdict, Certificate) and not verdict.per_row


def test_counts_what_has_no_rule() -> None:
    verdict = judge(lambda x, a: (x * a[:, None]).sum() * torch.special.bessel_j0(x.detach()).mean(), "a", x=X, a=ROW)
    assert isinstance(verdict, Certificate)
    assert verdict.unknown == ("aten.special_bessel_j0.default",)


def test_refuses_names_that_are_no_inputs() -> None:
    joint = trace(lambda x, a: (x * a[:, None]).sum(), x=X, a=ROW)
    with pytest.raises(PruneError, match=r"factor 'a' is carried by 'b', which is not an input; inputs: x, a"):
        analyse(joint, {"a": "b"}, hypothesis=Hypothesis(("a",)))


def test_refuses_factors_that_cannot_be_aligned() -> None:
    joint = trace_joint(
        lambda x, a, m: x.sum() * a.sum() * m.sum(), (X, torch.randn(1, 3)[0], TOKEN), names=("x", "a", "m"), wrt=("x",)
    )[0]
    for item in joint.inputs:  # sizes as a trace with fixed sizes has them
        if item.role != "tangent":
            item.node.meta["val"] = {"x": X, "a": torch.randn(3), "m": TOKEN}[item.name]
    with pytest.raises(PruneError, match="'a' and 'm' differ in dimension 0: 3 and 4"):
        analyse(joint, {"a": "a", "m": "m"}, hypothesis=Hypothesis(("a", "m")))


PROVED, REFUSED = ("grpo", "gspo", "put_in_place"), ("grpo_with_kl", "written_term")


@pytest.mark.parametrize("name", PROVED + REFUSED)
def test_an_operator_without_a_rule_only_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (joint,) = traced(name)
    used = {
        registry.operator_name(node.target) for node in joint.graph_module.graph.nodes if node.op == "call_function"
    }
    lost = 0
    for operator in sorted(used & registry.rules().keys()):
        with monkeypatch.context() as patch:
            patch.delitem(registry._RULES, operator)
            verdict = analyse(joint, FACTORS, hypothesis=HYPOTHESIS)
        assert name in PROVED or isinstance(verdict, Refusal), operator
        lost += isinstance(verdict, Refusal)
    assert lost > 3


def test_a_rule_that_breaks_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    (joint,) = traced("grpo")
    monkeypatch.setitem(registry._RULES, "aten.mul.Tensor", lambda flow, node, a, b: unknown(((),) * 9, torch.float32))
    with pytest.raises(AssertionError, match=r"rule for aten\.mul\.Tensor returned rank"):
        analyse(joint, {"adv": "adv", "mask": "mask"}, hypothesis=Hypothesis(("mask",)))


def test_is_fast() -> None:
    (joint,) = traced("truncated_importance")
    best = min(_seconds(joint) for _ in range(3))
    assert best < 0.5  # 0.04 s on an idle core


def _seconds(joint: JointGraph) -> float:
    start = time.process_time()
    assert analyse(joint, FACTORS, hypothesis=HYPOTHESIS)
    return time.process_time() - start
