"""Models that differentiate inside of their forward, and steps under the user's modes: as unpruned, call for call."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

import gradprune
from tests.step.arms import TinyModel, make_batch
from tests.step.losses import Loss, grpo


class Functional(TinyModel):
    """Under torch.func nobody may hook the tensors that are saved."""

    def forward(self, ids):
        slope = torch.func.grad(lambda weight: torch.tanh(self.embed(ids).detach() @ weight).sum())(self.mix.weight)
        return super().forward(ids) + slope.detach().mean()


class Penalized(TinyModel):
    """A gradient inside of the forward asks for what was saved in it."""

    def forward(self, ids):
        hidden = torch.tanh(self.mix(self.embed(ids)))
        (slope,) = torch.autograd.grad(hidden.square().sum(), hidden, retain_graph=True)
        return self.head(hidden * slope.detach())


class Doubling(TorchFunctionMode):
    """Changes what a function of torch gives."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") == "tanh" else result


def run(kind, around, pruned):
    """Gradients after some dead microbatches, how often a part of the model was called, and what was decided."""
    torch.manual_seed(0)
    model, calls = kind(), []
    model.mix.register_forward_hook(lambda *args: calls.append(None))
    step = gradprune.compile(Loss(grpo), zero="adv * mask") if pruned else Loss(grpo)
    for seed in range(3):
        with around():
            step(model, make_batch(4, 6, dead=True, seed=seed))[0].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, len(calls), [bool(d.outcome) for d in step.explain().decisions] if pruned else None


@pytest.mark.parametrize("kind, around", [(Functional, nullcontext), (Penalized, nullcontext), (TinyModel, Doubling)])
def test_as_unpruned(kind, around):
    expected, calls, _ = run(kind, around, pruned=False)
    found, again, outcomes = run(kind, around, pruned=True)
    assert again == calls and not any(outcomes)
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        assert gradient is None or torch.equal(gradient, found[name]), name
