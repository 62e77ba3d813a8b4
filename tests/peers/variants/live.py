"""Losses whose gradient no advantage switches off: the line to name is in each."""

from __future__ import annotations

import torch

TOKENS = 40.0


def _policy(logp, old, adv, mask):
    ratio = (logp - old).exp()
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)


def reference_divergence(logp, old, adv, mask, ref):
    divergence = (ref - logp).exp() - (ref - logp) - 1
    per_token = _policy(logp, old, adv, mask) + 0.04 * divergence
    return (per_token * mask).sum() / TOKENS


def divergence_added_last(logp, old, adv, mask, ref):
    loss = (_policy(logp, old, adv, mask) * mask).sum() / TOKENS
    gap = ((logp - ref).abs() * mask).sum() / mask.sum().clamp(min=1)
    return loss + 0.001 * gap


def decayed_coefficient(logp, old, adv, mask, ref):
    step, steps, first, last = 3, 10, 0.1, 0.0
    coefficient = first + (last - first) * step / steps
    gap = torch.clamp(ref - logp, -10, 10)
    per_token = _policy(logp, old, adv, mask) + coefficient * (gap.exp() - gap - 1)
    return (per_token * mask).sum() / TOKENS


def squared_drift(logp, old, adv, mask, ref):
    drift = 0.5 * (logp - old) ** 2
    return ((-adv * logp + 0.1 * drift) * mask).sum() / TOKENS


def tokens_outside_the_band(logp, old, adv, mask, ref):
    """The divergence of the tokens that the band takes out is kept."""
    log_ratio = logp - old
    ratio = log_ratio.exp()
    outside = (ratio < 0.8) | (ratio > 1.2)
    valid = mask.bool()
    loss = (-ratio * adv)[valid & ~outside].sum()
    loss = loss + 0.01 * log_ratio[valid & outside].sum()
    return loss / TOKENS


def entropy_bonus(logp, old, adv, mask, ref):
    logits = logp.unsqueeze(-1) * torch.linspace(-1, 1, 5)
    entropy = torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
    loss = (_policy(logp, old, adv, mask) * mask).sum() / TOKENS
    return loss - 0.01 * (entropy * mask).sum() / TOKENS


def likelihood_of_good_rows(logp, old, adv, mask, ref):
    chosen = (adv >= 0).float()
    likelihood = -(logp * chosen * mask).sum() / TOKENS
    return (_policy(logp, old, adv, mask) * mask).sum() / TOKENS + 0.1 * likelihood


def exponential_weight(logp, old, adv, mask, ref):
    weight = torch.exp(adv / 2.0).clamp(max=20.0)
    return -(weight * logp * mask).sum() / TOKENS


def divergence_in_the_advantage(logp, old, adv, mask, ref):
    gain = adv - 0.05 * (logp.detach() - ref)
    return -((logp - old).exp() * gain * mask).sum() / TOKENS


def floor_under_the_advantage(logp, old, adv, mask, ref):
    gain = adv.clamp(min=0.1)
    return -((logp - old).exp() * gain * mask).sum() / TOKENS


def sign_with_a_side(logp, old, adv, mask, ref):
    side = torch.where(adv >= 0, 1.0, -1.0)
    return -((logp - old).exp() * side * mask).sum() / TOKENS


def magnitude_penalty(logp, old, adv, mask, ref):
    loss = (_policy(logp, old, adv, mask) * mask).sum() / TOKENS
    return loss + 1e-4 * logp.square().mean()


def when_drift_is_large(logp, old, adv, mask, ref):
    """A branch on data whose one side is live."""
    loss = (_policy(logp, old, adv, mask) * mask).sum() / TOKENS
    drift = ((logp - ref) ** 2 * mask).sum() / mask.sum().clamp(min=1)
    if drift.detach() > 1e-4:
        loss = loss + 0.1 * drift
    return loss


def tokens_with_most_covariance(logp, old, adv, mask, ref):
    """The tokens picked by top-k get a divergence, whatever their advantage is."""
    valid = mask.flatten() > 0
    product = (adv - adv.mean()).flatten() * (logp.detach() - logp.detach().mean()).flatten()
    picked = torch.topk(torch.where(valid, product, -torch.inf), k=4).indices
    plain = _policy(logp, old, adv, mask).flatten()
    changed = plain.clone()
    changed[picked] = plain[picked] + 1.0 * (logp - old).abs().flatten()[picked]
    return (changed * mask.flatten()).sum() / TOKENS


class _Injected(torch.autograd.Function):
    """The identity, with a constant added to its gradient."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad + 1e-3


def gradient_injected(logp, old, adv, mask, ref):
    now = _Injected.apply(logp)
    return (_policy(now, old, adv, mask) * mask).sum() / TOKENS


def hook_on_the_gradient(logp, old, adv, mask, ref):
    now = logp * 1.0
    if now.requires_grad:
        now.register_hook(lambda grad: grad + 1e-3)
    return (_policy(now, old, adv, mask) * mask).sum() / TOKENS


def distilled_from_reference(logp, old, adv, mask, ref):
    teacher = torch.sigmoid(ref)
    distance = torch.nn.functional.binary_cross_entropy_with_logits(logp, teacher, weight=mask, reduction="sum")
    return (_policy(logp, old, adv, mask) * mask).sum() / TOKENS + 0.1 * distance / TOKENS


def norm_of_the_advantage(logp, old, adv, mask, ref):
    scale = adv / (adv.norm(dim=1, keepdim=True) + 1e-6) + 0.01
    return -(logp * scale * mask).sum() / TOKENS
