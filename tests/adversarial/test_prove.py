"""Losses whose gradient is not zero, by floating point rules or at other sizes, are not called proved."""

from __future__ import annotations

from collections.abc import Callable

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
