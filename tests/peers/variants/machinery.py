"""Losses that leave plain eager code: autograd functions, compiled helpers, casts, grad modes, modules."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS = 40.0


class _Surrogate(torch.autograd.Function):
    """The unclipped surrogate with its gradient by hand."""

    @staticmethod
    def forward(ctx, logp, old, adv, mask):
        ratio = torch.exp(logp - old)
        ctx.save_for_backward(ratio, adv, mask)
        return -(ratio * adv * mask).sum()

    @staticmethod
    def backward(ctx, grad):
        ratio, adv, mask = ctx.saved_tensors
        return -grad * ratio * adv * mask, None, None, None


def gradient_by_hand(logp, old, adv, mask, ref):
    return _Surrogate.apply(logp, old, adv, mask) / TOKENS


class _ScaledGradient(torch.autograd.Function):
    """The identity, its gradient scaled by a tensor: how auxiliary objectives ride along in some trainers."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.save_for_backward(scale)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        return grad * scale, None


def gradient_scaled_by_mask(logp, old, adv, mask, ref):
    ratio = torch.exp(_ScaledGradient.apply(logp, mask) - old)
    return -(ratio * adv * mask).sum() / TOKENS


@torch.compile(dynamic=True)
def _compiled_policy(gap: torch.Tensor, gain: torch.Tensor, low: float, high: float):
    ratio = (-gap).exp()
    first, second = -ratio * gain, -ratio.clamp(1 - low, 1 + high) * gain
    return torch.maximum(first, second), torch.gt(second, first).float()


@torch.compile(dynamic=True)
def _compiled_gap(now: torch.Tensor, then: torch.Tensor, kind: str):
    gap = now.float() - then.float()
    return gap**2 / 2.0 if kind == "square" else gap


def compiled_helpers(logp, old, adv, mask, ref):
    """Two helpers under ``torch.compile``; one feeds the log only."""
    policy, clipped = _compiled_policy(old - logp, adv, 0.2, 0.28)
    drift = (_compiled_gap(logp, ref, "square").detach() * mask).sum() / mask.sum().clamp(min=1)
    metrics = {"clipped": clipped.mean().item(), "drift": drift.item()}
    assert metrics
    return (policy * mask).sum() / TOKENS


@torch.compile(dynamic=True, fullgraph=True)
def _surprise_and_choice(logits: torch.Tensor, index: torch.Tensor):
    chosen = logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        spread = torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
    return chosen, spread


def from_logits(logp, old, adv, mask, ref):
    """The log-probability of a choice among logits, and an entropy for the log."""
    logits = logp.unsqueeze(-1) * torch.linspace(-1, 1, 5)
    index = torch.full(logp.shape, 3)
    chosen, spread = _surprise_and_choice(logits, index)
    metrics = {"entropy": ((spread * mask).sum() / mask.sum().clamp(min=1)).item()}
    assert metrics
    return -(chosen * adv * mask).sum() / TOKENS


def half_precision(logp, old, adv, mask, ref):
    """A ratio in bfloat16, cast back before it is summed."""
    ratio = (logp.to(torch.bfloat16) - old.to(torch.bfloat16)).exp()
    policy = -torch.min(ratio * adv.bfloat16(), ratio.clamp(0.8, 1.2) * adv.bfloat16())
    return (policy.float() * mask).sum() / mask.sum().clamp(min=1).double().float()


def autocast_region(logp, old, adv, mask, ref):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gram = (logp - old) @ torch.eye(logp.shape[1])
        ratio = gram.float().clamp(max=5.0).exp()
    return -(ratio * adv * mask).sum() / TOKENS


def weights_without_gradient(logp, old, adv, mask, ref):
    """Weights from three ways to switch gradients off."""
    with torch.no_grad():
        first = (logp - ref).exp().clamp(max=2.0)
    with torch.set_grad_enabled(False):
        second = torch.where(adv > 0, 1.0, 0.5)
    third = (logp.data - old).exp().clamp(0.5, 2.0)
    return -(first * second * third * adv * logp * mask).sum() / TOKENS


@torch.no_grad()
def _smoothing(adv: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    log_weight = (2.0 * logp - logp.exp()).clamp(-18.0, 20.0)
    return log_weight.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * (adv >= 0)


def decorated_without_gradient(logp, old, adv, mask, ref):
    return -(_smoothing(adv, logp) * adv * logp * mask).sum() / TOKENS


def recomputed(logp, old, adv, mask, ref):
    """The surrogate under activation checkpointing."""

    def surrogate(now):
        ratio = (now - old).exp()
        return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv) * mask

    return checkpoint(surrogate, logp, use_reentrant=False).sum() / TOKENS


@dataclass
class _Config:
    clip: float = 0.2
    beta: float = 0.0
    aggregate: str = "rows"
    history: list[float] = field(default_factory=list)


class _Objective(nn.Module):
    """A loss that is a module with a config, a buffer and a switch."""

    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, logp, old, adv, mask, ref):
        ratio = (logp - old).exp()
        per_token = -torch.min(ratio * adv, ratio.clamp(1 - self.config.clip, 1 + self.config.clip) * adv)
        if self.config.beta:
            per_token = per_token + self.config.beta * (logp - ref).pow(2)
        match self.config.aggregate:
            case "rows":
                loss = ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
            case _:
                raise ValueError(self.config.aggregate)
        self.config.history.append(loss.item())
        return loss * self.scale


_OBJECTIVE = _Objective(_Config())


def module_with_config(logp, old, adv, mask, ref):
    return _OBJECTIVE(logp, old, adv, mask, ref)


def in_chunks(logp, old, adv, mask, ref):
    """The batch in chunks of rows, each with its share of the denominator."""
    total = torch.zeros(())
    count = mask.sum().clamp(min=1)
    for now, then, gain, valid in zip(*(tensor.chunk(3) for tensor in (logp, old, adv, mask))):
        total += -((now - then).exp() * gain * valid).sum() / count
    return total
