"""A graph that keeps nothing gives the gradients of one that keeps all, and holds nothing meanwhile."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gradprune.runtime.random_state import RandomState
from gradprune.runtime.unsaved import Unsaved


class Twice(torch.autograd.Function):
    """Reads what it saved twice, as none of torch's own nodes does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,), (y,) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (x + y)


def plain(weight, x):
    return torch.tanh(x @ weight).exp().sum()


def reads_twice(weight, x):
    return Twice.apply(torch.tanh(x @ weight)).sum()


def with_checkpoint(weight, x):
    hidden = checkpoint(lambda: torch.tanh(x @ weight).exp(), use_reentrant=False)
    return checkpoint(lambda hidden: torch.tanh(hidden @ weight), hidden, use_reentrant=False).sum()


def with_reentrant_checkpoint(weight, x):
    return checkpoint(lambda hidden: torch.tanh(hidden @ weight).exp(), x @ weight, use_reentrant=True).sum()


def with_gradient_inside(weight, x):
    hidden = torch.tanh(x @ weight)
    (gradient,) = torch.autograd.grad(hidden.exp().sum(), hidden, retain_graph=True)
    return (hidden * gradient.detach()).sum()


def under_autocast(weight, x):
    return torch.tanh(torch.tanh(x @ weight) @ weight).float().exp().sum()


def with_dropout(weight, x):
    return torch.dropout(torch.tanh(x @ weight), 0.5, True).exp().sum()


FORWARDS = [plain, reads_twice, with_checkpoint, with_reentrant_checkpoint, with_gradient_inside, with_dropout]


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 6, generator=generator).requires_grad_(), torch.randn(4, 6, generator=generator)


def both(forward):
    """The gradient as it is, and of a graph that keeps nothing."""
    found = []
    for unsaved in (False, True):
        weight, x = inputs()
        torch.manual_seed(1)
        if unsaved:
            loss = Unsaved(lambda: forward(weight, x), RandomState([]).lent()).run()  # noqa: B023
        else:
            loss = forward(weight, x)
        loss.backward()
        found.append(weight.grad)
    return found


@pytest.mark.parametrize("forward", FORWARDS)
def test_gives_the_same_gradient(forward):
    kept, unsaved = both(forward)
    assert kept.any() and torch.equal(kept, unsaved)


def test_runs_again_under_the_autocast_of_the_first_time():
    gradients = []
    for unsaved in (False, True):
        weight, x = inputs()
        with torch.autocast("cpu", torch.bfloat16):
            run = Unsaved(lambda: under_autocast(weight, x), nullcontext()).run  # noqa: B023
            loss = run() if unsaved else under_autocast(weight, x)
        loss.backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)
    weight, x = inputs()
    under_autocast(weight, x).backward()
    assert not torch.equal(weight.grad, gradients[0])


def test_leaves_autocast_as_the_backward_found_it():
    weight, x = inputs()
    loss = Unsaved(lambda: plain(weight, x), nullcontext()).run()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def settings():
    allowed = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    return torch.empty(1).dtype, torch.empty(1).device.type, *allowed


@contextmanager
def default_type():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("around", [default_type, lambda: torch.device("meta"), lambda: sdpa_kernel([SDPBackend.MATH])])
def test_runs_again_under_the_settings_of_the_first_time(around):
    seen = []

    def forward():
        seen.append(settings())
        return plain(weight, x)

    weight, x = inputs()
    before = settings()
    with around():
        loss = Unsaved(forward, nullcontext()).run()
    loss.backward()
    assert seen[0] == seen[1] != before == settings()


def test_backward_under_inference_mode():
    gradients = []
    for unsaved in (False, True):
        weight, x = inputs()
        loss = Unsaved(lambda: plain(weight, x), nullcontext()).run() if unsaved else plain(weight, x)  # noqa: B023
        with torch.inference_mode():
            loss.backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def test_says_so_where_a_saved_tensor_is_written_to():
    def forward():
        hidden = torch.exp(x @ weight)
        hidden.add_(1)
        return hidden.sum()

    weight, x = inputs()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Unsaved(forward, nullcontext()).run().backward()


def test_nested_tensors_are_kept():
    def forward():
        rows = torch.nested.as_nested_tensor([x[:1] @ weight, x[1:] @ weight], layout=torch.jagged)
        return (torch.tanh(rows) * 2).values().sum()

    gradients = []
    for unsaved in (False, True):
        weight, x = inputs()
        (Unsaved(forward, nullcontext()).run() if unsaved else forward()).backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def test_runs_again_once_for_all_backwards():
    calls = []

    def forward():
        calls.append(None)
        return plain(weight, x)

    weight, x = inputs()
    loss = Unsaved(forward, nullcontext()).run()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (curvature,) = torch.autograd.grad(first.square().sum(), weight)
    assert len(calls) == 2 and torch.equal(first, second)
    loss = plain(weight, x)
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.equal(curvature, torch.autograd.grad(first.square().sum(), weight)[0])


def test_keeps_nothing_until_it_is_asked_and_lets_go_of_it_after():
    made: list[weakref.ref[torch.Tensor]] = []

    def forward():
        hidden = x
        for _ in range(5):
            hidden = torch.tanh(hidden @ weight)
            made.append(weakref.ref(hidden))
        return hidden.sum()

    weight, x = inputs()
    loss = Unsaved(forward, nullcontext()).run()
    gc.collect()
    assert not any(ref() is not None for ref in made)
    loss.backward()
    gc.collect()
    assert len(made) == 10 and not any(ref() is not None for ref in made)


def test_says_so_where_the_second_run_is_another():
    weight, x = inputs()
    runs = []

    def forward():
        runs.append(None)
        return plain(weight, x) if len(runs) == 1 else (x @ weight).sum()

    loss = Unsaved(forward, nullcontext()).run()
    with pytest.raises(RuntimeError, match=r"saved 3 tensors of .*, and 1 of \d+ when it was run again"):
        loss.backward()


def test_takes_its_hooks_off_where_the_forward_raises():
    def forward():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Unsaved(forward, nullcontext()).run()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
