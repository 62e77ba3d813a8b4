"""What a zero advantage really does to a loss: measured on gradients, with no help from the prover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

ROWS, TOKENS = 6, 8
DEAD = 2  # rows 0 and 1 have no advantage
DRAWS = (3, 11, 29)
FAR = 200.0  # exp(FAR) overflows in float32


@dataclass(frozen=True)
class Batch:
    """Arguments of a loss: float32 ``[R, T]`` each; the mask is 0 or 1."""

    logp: torch.Tensor
    old: torch.Tensor
    adv: torch.Tensor
    mask: torch.Tensor
    ref: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.logp, self.old, self.adv, self.mask, self.ref


def draw(seed: int) -> Batch:
    """A batch off policy: one advantage a row, none for rows 0 and 1; a prefix of each row is valid."""
    gen = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(ROWS, TOKENS, generator=gen) - 0.05
    lengths = torch.randint(3, TOKENS - 1, (ROWS, 1), generator=gen)
    adv = torch.randn(ROWS, 1, generator=gen).expand(ROWS, TOKENS).clone()
    adv[:DEAD] = 0
    return Batch(
        logp=logp,
        old=logp + 0.3 * torch.randn(ROWS, TOKENS, generator=gen),
        adv=adv,
        mask=(torch.arange(TOKENS) < lengths).float(),
        ref=logp + 0.2 * torch.randn(ROWS, TOKENS, generator=gen),
    )


def holed(batch: Batch, seed: int) -> Batch:
    """The same with holes in the mask and advantages only where the mask is 0: the product is zero everywhere.

    Row 0's first token is masked and has an advantage: a loss that reads one column as the row's advantage sees it.
    """
    gen = torch.Generator().manual_seed(seed + 1000)
    mask = (torch.rand(ROWS, TOKENS, generator=gen) > 0.4).float()
    mask[0, 0], mask[1, 0], mask[:, 3] = 0, 1, 1
    return replace(batch, mask=mask, adv=torch.randn(ROWS, TOKENS, generator=gen) * (1 - mask))


def overflowing(batch: Batch, row: int, token: int) -> Batch:
    """The same where ``exp(logp - old)`` is infinite at one token."""
    old = batch.old.clone()
    old[row, token] = batch.logp[row, token] - FAR
    return replace(batch, old=old)


def gradient(loss: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Gradient with respect to the log-probabilities; zeros where autograd says that nothing reaches them."""
    leaf = batch.logp.clone().requires_grad_()
    value = loss(leaf, *batch.args()[1:])
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (grad,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if grad is None else grad


@dataclass(frozen=True)
class Truth:
    """zero_microbatch: all advantages 0 gives a gradient of exact zeros. zero_product: the same where only the product
    of advantage and mask is 0. zero_on_policy, zero_off_policy: rows without advantage get exact zeros among live rows,
    with ``old == logp`` or not. rows_coupled: masking those rows changes what the others get. nan_on_overflow: an
    infinite ratio at a valid token without advantage gives a NaN."""

    zero_microbatch: bool
    zero_product: bool
    zero_on_policy: bool
    zero_off_policy: bool
    rows_coupled: bool
    nan_on_overflow: bool


def measure(loss: Callable[..., torch.Tensor]) -> Truth:
    """The worst over a few draws: one draw may be zero by luck. Helpers under ``torch.compile`` run uncompiled."""
    with torch.compiler.set_stance("force_eager"):
        return Truth(*(worst(column) for worst, column in zip((all, all, all, all, any, any), zip(*_draws(loss)))))


def _draws(loss: Callable[..., torch.Tensor]) -> Iterator[tuple[bool, ...]]:
    for seed in DRAWS:
        batch = draw(seed)
        dead = replace(batch, adv=torch.zeros_like(batch.adv))
        off = gradient(loss, batch)
        on = gradient(loss, replace(batch, old=batch.logp.clone()))
        masked = batch.mask.clone()
        masked[:DEAD] = 0
        alone = gradient(loss, replace(batch, mask=masked))
        yield (
            _is_zero(gradient(loss, dead)),
            _is_zero(gradient(loss, holed(batch, seed))),
            _is_zero(on[:DEAD]),
            _is_zero(off[:DEAD]),
            not torch.equal(alone[DEAD:], off[DEAD:]),
            _is_nan(loss, overflowing(batch, 0, 0)),
        )


def _is_nan(loss: Callable[..., torch.Tensor], batch: Batch) -> bool:
    try:
        return bool(gradient(loss, batch).isnan().any())
    except (AssertionError, ValueError):  # the loss refuses such a batch by itself
        return False


def _is_zero(tensor: torch.Tensor) -> bool:
    return not bool(tensor.ne(0).any() | tensor.isnan().any())
