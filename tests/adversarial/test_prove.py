"""Losses whose gradient is not zero, by floating point rules or at other sizes, are not called proved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import gradprune

INF, NAN = float("inf"), float("nan")
FOUR = torch.Size([4])

# name -> (loss of x, w and adv, w at which the gradient of x is not finite although adv is zero)
BROKEN: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "alpha of add": (lambda x, w, adv: (x * torch.add(torch.zeros(4), adv, alpha=INF)).sum(), 1.0),
    "alpha of sub": (lambda x, w, adv: (x * torch.sub(torch.zeros(4), adv, alpha=INF)).sum(), 1.0),
    "number above float32": (lambda x, w, adv: (x * (adv * 1e39)).sum(), 1.0),
    "number below float32": (lambda x, w, adv: (x * (adv / 1e-50)).sum(), 1.0),
    "comparison with NaN": (lambda x, w, adv: (x * ~(w.abs() >= adv)).sum() + (x * adv).sum(), NAN),
    "power of zero": (lambda x, w, adv: (x * adv**0).sum(), 1.0),
    "angle of minus zero": (lambda x, w, adv: (x * torch.atan2(adv, -w)).sum(), 1.0),
}


def gradient(loss: Callable[..., torch.Tensor], **inputs: torch.Tensor) -> torch.Tensor:
    inputs["x"].requires_grad_()
    return torch.autograd.grad(loss(**inputs), inputs["x"])[0]


@pytest.mark.parametrize("name", BROKEN)
def test_refuses_or_states_a_condition(name):
    loss, w = BROKEN[name]
    found = gradient(loss, x=torch.ones(4), w=torch.full(FOUR, w), adv=torch.zeros(4))
    assert not (found == 0).all()
    verdict = gradprune.prove(loss, {"x": torch.rand(4), "w": torch.rand(4), "adv": torch.rand(4)}, zero="adv", wrt="x")
    if verdict:  # then a stated condition catches it: it speaks of w, or of its absolute value
        assert {"w", "abs"} & {condition.value for condition in verdict.conditions}, verdict


def either(number):
    return (number < 1) | (number >= 1)


# The gradient of x is not zero where adv is, for the w beside each; a rule of real numbers says that it were.
ALGEBRA: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "difference": (lambda x, w, adv: (x * adv).sum() + x.sum() * (w.max().item() - w.max().item()), INF),
    "quotient": (lambda x, w, adv: (x * adv).sum() + x.sum() * (w.max().item() / w.max().item() - 1), INF),
    "there and back": (lambda x, w, adv: (x * adv).sum() + x.sum() * (w.max().item() + 1 - w.max().item() - 1), INF),
    "at most": (lambda x, w, adv: (x * adv).sum() + (0 if w.max().item() <= w.max().item() else x.sum()), NAN),
    "positive": (lambda x, w, adv: (x * adv).sum() + (0 if abs(w.max().item()) >= 0 else x.sum()), NAN),
    "either side": (lambda x, w, adv: (x * adv).sum() + (0 if either(w.max().item()) else x.sum()), NAN),
    "below infinity": (lambda x, w, adv: (x * adv).sum() + (0 if w.max().item() < INF else x.sum()), INF),
    "size over infinity": (lambda x, w, adv: (x * adv).sum() + x.sum() * (x.shape[0] // -INF), 1.0),
    "softplus": (lambda x, w, adv: (torch.nn.functional.softplus(x, beta=NAN) * adv).sum(), 1.0),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_refuses_what_only_real_numbers_would_prove(name):
    loss, w = ALGEBRA[name]
    found = gradient(loss, x=torch.ones(4), w=torch.full(FOUR, w), adv=torch.zeros(4))
    assert not (found == 0).all()
    assert not gradprune.prove(loss, (torch.rand(4), torch.rand(4), torch.rand(4)), zero="adv", wrt="x")


@pytest.mark.parametrize(
    ("number", "w", "kind"), [(lambda w: w * 0.0, INF, "finite"), (lambda w: float(w != w), NAN, "notnan")]
)
def test_states_what_a_number_of_data_must_be(number, w, kind):
    def loss(x, w, adv):
        return (x * adv).sum() + x.sum() * number(w.max().item())

    found = gradient(loss, x=torch.ones(4), w=torch.full(FOUR, w), adv=torch.zeros(4))
    assert not (found == 0).all()
    verdict = gradprune.prove(loss, (torch.rand(4), torch.rand(4), torch.rand(4)), zero="adv", wrt="x")
    assert not verdict or [condition.kind for condition in verdict.conditions] == [kind]


#: Numbers that are no numbers, where a rule asks about its operands. Whether the gradient of x is zero is measured.
NO_NUMBERS: dict[str, Callable[..., torch.Tensor]] = {
    "clamp": lambda x, adv: torch.clamp(x * adv, min=NAN).sum(),
    "clamp of a factor": lambda x, adv: (x * torch.clamp(adv, max=NAN)).sum(),
    "product": lambda x, adv: (x * adv * NAN).sum(),
    "quotient": lambda x, adv: (x * adv / NAN).sum(),
    "comparison": lambda x, adv: ((x > NAN) * x).sum() + (x * adv).sum(),
    "fill": lambda x, adv: (x * adv).masked_fill(adv != 0, NAN).sum(),
    "where": lambda x, adv: torch.where(adv == 0, NAN, x * adv).sum(),
    "power": lambda x, adv: (x * adv**NAN).sum(),
    "slope": lambda x, adv: torch.nn.functional.leaky_relu(x * adv, NAN).sum(),
    "norm": lambda x, adv: torch.linalg.vector_norm(x * adv, ord=NAN),
    "remainder": lambda x, adv: torch.remainder(x * adv, NAN).sum(),
    "alpha": lambda x, adv: torch.add(x * adv, adv, alpha=NAN).sum(),
    "complex": lambda x, adv: (x * adv * complex(NAN, INF)).real.sum(),
    "number of data": lambda x, adv: (x * adv).sum() * (adv.max().item() + NAN),
    "comparison of data": lambda x, adv: (x * adv).sum() * (2.0 if adv.max().item() > NAN else 1.0),
    "extremum of data": lambda x, adv: (x * adv).sum() * min(adv.max().item(), NAN),
    "floor of data": lambda x, adv: (x * adv).sum() * (adv.max().item() // NAN),
    "remainder of data": lambda x, adv: (x * adv).sum() * (adv.max().item() % INF),
    "remainder of a size": lambda x, adv: (x * adv).sum() * (x.shape[0] % -INF),
    "power of data": lambda x, adv: (x * adv).sum() * np.power(round(adv.max().item()), x.shape[0]),
    "infinite size": lambda x, adv: (x * adv).sum() * (x.shape[0] * INF),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_takes_numbers_that_are_none(name):
    """Neither an error nor a proof without a condition where the gradient is NaN."""
    loss = NO_NUMBERS[name]
    zero = bool((gradient(loss, x=torch.rand(4), adv=torch.zeros(4)) == 0).all())
    verdict = gradprune.prove(loss, (torch.rand(4), torch.rand(4)), zero="adv", wrt="x")
    assert zero or not verdict or any(condition.kind == "finite" for condition in verdict.conditions), verdict


def test_states_that_a_limit_is_a_number():
    """clamp(c, NaN, 0) is NaN, not 0."""

    def loss(x, c, w, adv):
        return (x * torch.clamp(c, min=w.abs(), max=adv)).sum()

    inputs = {"c": torch.ones(4), "w": torch.full(FOUR, NAN), "adv": torch.zeros(4)}
    assert gradient(loss, x=torch.ones(4), **inputs).isnan().all()
    verdict = gradprune.prove(loss, {"x": torch.rand(4), **inputs}, zero="adv", wrt="x")
    assert not verdict or {"c", "abs"} <= {condition.value for condition in verdict.conditions}


def on_size(x, adv):
    return x.sum() if x.shape[0] > 8 else (adv * x).sum()


def on_remainder(x, adv):
    return x.sum() if x.shape[0] % 2 else (adv * x).sum()


def on_count(x, adv):
    return (adv * x).sum() + (0.0 if x.numel() < 100 else 1.0) * x.sum()


@pytest.mark.parametrize(("loss", "rows"), [(on_size, 16), (on_remainder, 5), (on_count, 200)])
def test_claims_no_size_that_was_decided_on(loss, rows):
    assert gradient(loss, x=torch.rand(rows), adv=torch.zeros(rows)).abs().max() > 0
    verdict = gradprune.prove(loss, (torch.rand(4), torch.rand(4)), zero="adv", wrt="x")
    assert verdict
    assert verdict.symbolic == ()


def test_claims_any_size_where_none_was_decided_on():
    verdict = gradprune.prove(lambda x, adv: (adv * x).sum(), (torch.rand(4), torch.rand(4)), zero="adv", wrt="x")
    assert verdict.symbolic == ("x[0]", "adv[0]")


def test_counts_of_other_rows_couple_them():
    """The number of valid tokens, counted as a sum of ones, is that of all rows."""

    def loss(x, adv, mask):
        return (x * adv[:, None]).sum() / torch.ones_like(x[mask > 0]).sum()

    verdict = gradprune.prove(loss, (torch.rand(4, 5), torch.rand(4), torch.ones(4, 5)), zero="adv", wrt="x")
    assert verdict
    assert not verdict.per_row
