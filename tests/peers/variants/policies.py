"""Policy objectives as papers and trainers write them: how ratios are clipped, truncated, gated and averaged."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

TOKENS = 40.0


def _masked_mean(values, mask, dim=None):
    if dim is None:
        return (values * mask).sum() / mask.sum().clamp(min=1.0)
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1.0)


def gspo(logp, old, adv, mask, ref):
    """One length-normalised ratio a sequence."""
    log_ratio = ((logp - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    ratio = torch.exp(log_ratio)
    gain = (adv * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return -torch.min(ratio * gain, ratio.clamp(1 - 3e-4, 1 + 4e-4) * gain).mean()


def gspo_token(logp, old, adv, mask, ref):
    """The sequence's ratio as a value at each token, and token advantages."""
    sequence = _masked_mean(logp - old, mask, -1).detach().unsqueeze(-1)
    ratio = torch.exp(sequence + logp - logp.detach())
    policy = torch.maximum(-adv * ratio, -adv * torch.clamp(ratio, 1 - 3e-4, 1 + 4e-4))
    return _masked_mean(policy, mask, -1).mean()


def cispo(logp, old, adv, mask, ref):
    """A truncated importance weight without gradient times the policy gradient."""
    weight = torch.exp(logp - old).clamp(max=5.0).detach()
    return -(weight * adv * logp * mask).sum() / mask.sum()


def dual_clip(logp, old, adv, mask, ref):
    ratio = torch.exp((logp - old).clamp(-20.0, 20.0))
    clipped = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    lower = torch.min(clipped, -adv * 3.0)
    return _masked_mean(torch.where(adv < 0, lower, clipped), mask)


def truncated_importance(logp, old, adv, mask, ref):
    """The engine's log-probabilities against the trainer's: a weight truncated from above."""
    weight = torch.exp(old - ref).clamp(max=2.0).detach()
    ratio = torch.exp(logp - old)
    policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.28) * adv) * weight
    return (policy * mask).sum() / TOKENS


def masked_importance(logp, old, adv, mask, ref):
    """The same, but tokens out of a band are masked out, and whole sequences with one catastrophic token."""
    gap = (old - ref).detach()
    weight = gap.exp()
    band = (weight > 0.5) & (weight < 2.0)
    veto = ((gap < -6.0) & mask.bool()).any(-1, keepdim=True)
    keep = mask * band * ~veto
    return -(torch.exp(logp - old) * adv * weight * keep).sum() / keep.sum().clamp(min=1)


def geometric_importance(logp, old, adv, mask, ref):
    """A geometric mean of weights a sequence decides which sequences stay."""
    gap = _masked_mean((old - ref).detach(), mask, -1)
    stays = torch.logical_and(gap.exp() > 0.99, gap.exp() < 1.5).to(logp.dtype)
    policy = -torch.exp(logp - old) * adv * stays[:, None]
    return _masked_mean(policy, mask)


def without_length_bias(logp, old, adv, mask, ref):
    """No division by lengths: a sum over tokens, by the longest possible response."""
    ratio = torch.exp(logp - old)
    policy = -torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv)
    return (policy * mask).sum(dim=-1).div(policy.shape[-1]).mean()


def geometric_mean_policy(logp, old, adv, mask, ref):
    """The clip is on log-ratios, by the sign of the advantage, and a sequence has their geometric mean."""
    gap = logp - old
    sign = torch.sign(adv)
    clipped = torch.min(sign * gap, sign * gap.clamp(-0.4, 0.4)) * sign
    sequence = torch.exp((clipped * mask).sum(-1) / mask.sum(-1).clamp(min=1))
    gain = (adv * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return -(gain * sequence).mean()


def soft_gate(logp, old, adv, mask, ref):
    """A sigmoid around 1 in place of the clip, its temperature by the sign of the advantage."""
    ratio = torch.exp(logp - old)
    tau = torch.where(adv > 0, torch.full_like(adv, 1.0), torch.full_like(adv, 1.05))
    gate = torch.sigmoid(tau * (ratio - 1)) * (4.0 / tau)
    return -_masked_mean(gate * adv, mask)


def agentic_branches(logp, old, adv, mask, ref):
    """Tokens that branches share have the mean advantage of the branches: here of neighbouring rows."""
    pairs = adv.view(-1, 2, adv.shape[-1]).mean(1, keepdim=True).expand(-1, 2, -1).reshape(adv.shape)
    shared = torch.arange(adv.shape[-1]) < 2
    gain = torch.where(shared, pairs, adv)
    return _masked_mean(-torch.exp(logp - old) * gain, mask)


def high_entropy_tokens(logp, old, adv, mask, ref):
    """Only tokens whose entropy is above a quantile of the valid ones count."""
    entropy = (-ref * ref.exp()).detach()
    level = torch.quantile(entropy[mask.bool()], 0.8)
    chosen = mask * (entropy >= level)
    return -(torch.exp(logp - old) * adv * chosen).sum() / chosen.sum().clamp(min=1)


def nan_quantile(logp, old, adv, mask, ref):
    """The same with masked entropies as NaN."""
    entropy = torch.where(mask.bool(), -ref * ref.exp(), torch.nan).detach()
    chosen = (entropy >= torch.nanquantile(entropy, 0.5)).float()
    return -(torch.exp(logp - old) * adv * mask * chosen).sum() / TOKENS


def largest_advantages(logp, old, adv, mask, ref):
    """The rows with the largest advantages are kept, by a top-k mask."""
    size = adv.abs().mean(-1)
    kept = torch.zeros_like(size).scatter(0, size.topk(3).indices, 1.0)
    return -(torch.exp(logp - old) * adv * mask * kept.unsqueeze(-1)).sum() / TOKENS


def smallest_probability(logp, old, adv, mask, ref):
    """The least likely tokens of each row get nothing: k-th values as thresholds."""
    level = torch.kthvalue(old, 2, dim=-1, keepdim=True).values
    return _masked_mean(-torch.exp(logp - old) * adv * (old > level), mask)


def positive_only(logp, old, adv, mask, ref):
    return -(F.relu(adv) * logp * mask).sum() / mask.sum().clamp_min(1)


def asymmetric_weights(logp, old, adv, mask, ref):
    """Negative samples weigh less, and token losses have a cap."""
    gain = torch.where(adv >= 0, adv, 0.5 * adv)
    policy = (-torch.exp(logp - old) * gain).clamp(max=10.0)
    return (policy * mask).sum() / TOKENS


def leaky_clip(logp, old, adv, mask, ref):
    """Outside of the band the ratio goes on with a small slope."""
    ratio = torch.exp(logp - old)
    outside = ratio.clamp(0.8, 1.2)
    leaky = outside + 0.01 * (ratio - outside)
    return _masked_mean(-torch.minimum(ratio * adv, leaky * adv), mask)


def squared_log_ratio(logp, old, adv, mask, ref):
    """Regression of log-ratios to advantages: its gradient does not vanish with them."""
    return _masked_mean(((logp - old) - adv) ** 2, mask)


def tempered(logp, old, adv, mask, ref):
    """Advantages through tanh, ratios through log1p: zero stays zero."""
    return _masked_mean(-torch.tanh(adv) * torch.log1p(torch.exp(logp - old)), mask)


def advantages_over_deviation(logp, old, adv, mask, ref):
    """Normalised in the loss, without taking the mean off."""
    return _masked_mean(-torch.exp(logp - old) * adv / (adv.std() + 1e-6), mask)


def whitened(logp, old, adv, mask, ref):
    """Normalised in the loss over valid tokens, mean and all."""
    mean = _masked_mean(adv, mask)
    deviation = _masked_mean((adv - mean) ** 2, mask).sqrt()
    return _masked_mean(-torch.exp(logp - old) * (adv - mean) / (deviation + 1e-6), mask)


def entropy_shaped(logp, old, adv, mask, ref):
    """Advantages get a detached bonus of entropy, at most half of themselves."""
    bonus = torch.minimum(0.4 * (-ref * ref.exp()).detach(), adv.abs() / 2)
    return _masked_mean(-torch.exp(logp - old) * (adv + bonus), mask)


def entropy_bonus(logp, old, adv, mask, ref):
    """A bonus on top of the loss flows, whatever the advantages."""
    return _masked_mean(-torch.exp(logp - old) * adv, mask) + 0.001 * _masked_mean(logp.exp() * logp, mask)


def scheduled_by_functools(logp, old, adv, mask, ref):
    step = functools.reduce(lambda total, part: total + part, ((logp - old).exp() * adv * mask).unbind(-1))
    return -step.sum() / TOKENS


def by_einsum(logp, old, adv, mask, ref):
    return -torch.einsum("rt,rt,rt->", torch.exp(logp - old), adv, mask) / TOKENS


def by_cosine(logp, old, adv, mask, ref):
    """A dot product of each row's log-probabilities with its weights."""
    return -(logp.unsqueeze(1) @ (adv * mask).unsqueeze(-1)).mean()


def by_lerp(logp, old, adv, mask, ref):
    """Between the clipped and the unclipped surrogate."""
    ratio = torch.exp(logp - old)
    return -(torch.lerp(ratio * adv, ratio.clamp(0.8, 1.2) * adv, 0.3) * mask).sum() / TOKENS


def by_addcmul(logp, old, adv, mask, ref):
    return -torch.addcmul(torch.zeros_like(adv), torch.exp(logp - old) * mask, adv).sum() / TOKENS


def by_logsumexp(logp, old, adv, mask, ref):
    """A smooth maximum of the two surrogates: not zero where they are."""
    ratio = torch.exp(logp - old)
    both = torch.stack([-ratio * adv, -ratio.clamp(0.8, 1.2) * adv])
    return (torch.logsumexp(both, 0) * mask).sum() / TOKENS


def by_smooth_l1(logp, old, adv, mask, ref):
    return F.smooth_l1_loss(torch.exp(logp - old) * adv * mask, torch.zeros_like(adv), reduction="sum")
