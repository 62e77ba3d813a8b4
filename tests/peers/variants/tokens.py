"""Losses that weigh single tokens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

CLIP_LOW, CLIP_HIGH, DUAL = 0.2, 0.28, 3.0
TOKENS = 40.0  # of the global batch


def token_sum_over_count(logp, old, adv, mask, ref):
    """The ratio of masked log-probabilities, and a denominator that nothing keeps from zero."""
    ratio = torch.exp((logp - old) * mask)
    plain = -adv * ratio
    clipped = -adv * torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_LOW)
    return torch.sum(torch.max(plain, clipped) * mask) / mask.sum()


def dual_clip_with_divergences(logp, old, adv, mask, ref):
    """Dual clip; a page of divergences between sampler and trainer that only the log reads."""
    metrics = {}
    error = ((old - ref).abs() * mask).exp()
    metrics["probability error"] = ((error * mask).sum() / TOKENS).item()
    mixture = (0.5 * old.exp() + 0.5 * ref.exp()).log()
    for name, one in (("old", old), ("ref", ref)):
        divergence = (one - mixture).exp() - (one - mixture) - 1
        metrics[name] = ((divergence * mask).sum() / TOKENS).item()
    ratio = (logp - old).exp()
    first, second = -adv * ratio, -adv * ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH)
    worst = torch.max(first, second)
    worst = torch.where(adv < 0, torch.min(worst, -adv * DUAL), worst)
    valid = ratio.detach()[mask.bool()]
    metrics["least"] = valid.min().item() if valid.numel() > 0 else math.inf
    metrics["most"] = valid.max().item() if valid.numel() > 0 else -math.inf
    return (worst * mask).sum() / TOKENS


def band_of_ratios(logp, old, adv, mask, ref):
    """Tokens whose sampler disagrees too much are dropped, the rest is reweighted by that disagreement."""
    weight = (old - ref).detach().exp()
    weight = torch.where((weight >= 0.5) & (weight <= 5.0), weight, torch.zeros_like(weight))
    ratio = (logp - old).exp()
    policy = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.28) * adv)
    return ((policy * weight * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def clipped_weight_both_sides(logp, old, adv, mask, ref):
    """A detached clipped weight on the log-probability, switched off where clipping would have stopped it."""
    ratio = (logp - old).exp()
    weight = ratio.clamp(0.9, 1.1).detach()
    stopped = ((adv > 0) & (ratio > 1.1)) | ((adv < 0) & (ratio < 0.9))
    policy = -weight * adv * logp * (~stopped).float()
    metrics = {"stopped": stopped.float().mean().detach().item(), "most": ratio.max().item()}
    assert metrics["stopped"] is not None
    return (policy * mask).sum() / mask.sum().clamp_min(1)


def tapered_by_sign(logp, old, adv, mask, ref):
    """Good rows as in supervised tuning, bad rows with a truncated weight; counts of both for the log."""
    score = adv.sum(-1)
    good, bad = (score > 0).float(), (score <= 0).float()
    share = good.sum().item() / len(score) * 100
    spread = score.std().item()
    ratio = (logp - old).exp()
    up = -adv * logp * good.unsqueeze(-1)
    down = -ratio.clamp(min=0.0, max=1.0).detach() * adv * logp * bad.unsqueeze(-1)
    metrics = {"share": share, "spread": spread, "zero": (good.sum() / (good.size(0) + 1e-8)).item()}
    assert len(metrics) == 3
    return ((up + down) * mask).sum(dim=-1).mean()


def quadratic_penalty(logp, old, adv, mask, ref):
    """The ratio is pulled to one by a square that the advantage's size scales."""
    ratio = torch.exp(logp - old)
    policy = adv * ratio - adv.abs() / (2 * CLIP_LOW) * (ratio - 1).pow(2)
    return -(policy * mask).sum() / torch.count_nonzero(mask).clamp(min=1)


def bounds_from_advantage(logp, old, adv, mask, ref):
    """Clip bounds that are tensors: wider where the advantage is larger."""
    width = 0.2 + 0.1 * torch.tanh(adv.abs())
    ratio = torch.exp(logp - old)
    inner = torch.clamp(ratio, 1 - width, 1 + width)
    return -(torch.min(ratio * adv, inner * adv) * mask).sum() / max(1, logp.shape[0] * logp.shape[1])


def positive_tokens_only(logp, old, adv, mask, ref):
    """Supervised tuning on tokens with a positive advantage: nothing where the advantage is zero."""
    return -(logp * (adv > 0) * mask).sum() / mask.sum().clamp(min=1.0)


def soft_gate(logp, old, adv, mask, ref):
    """A sigmoid gate whose temperature is picked by the sign of the advantage, from the config's floats."""
    hot, cold = torch.tensor(1.05), torch.tensor(1.0)
    temperature = torch.where(adv > 0, cold, hot)
    ratio = (logp - old).clamp(-20, 20).exp()
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return (F.softplus(torch.zeros(())) * 0 - gate * adv * mask).sum() / TOKENS


def prefix_ratio(logp, old, adv, mask, ref):
    """Each token is weighted by the ratio of the whole prefix before it."""
    prefix = ((logp - old) * mask).cumsum(dim=1).clamp(max=10.0).exp()
    return -(prefix * adv * mask).sum() / mask.sum().clamp(min=1)


def contraction(logp, old, adv, mask, ref):
    """Sums written as products of matrices and vectors."""
    ratio = torch.exp(logp - old)
    weighted = torch.einsum("rt,rt->rt", adv, mask)
    return -torch.dot(ratio.flatten(), weighted.flatten()) / TOKENS + 0.0 * (weighted @ ratio.T).sum()


def centred_advantage(logp, old, adv, mask, ref):
    """Advantages normalised over the valid tokens of the batch inside the loss."""
    count = mask.sum().clamp(min=1)
    mean = (adv * mask).sum() / count
    spread = ((adv - mean).pow(2) * mask).sum() / count
    white = (adv - mean) * torch.rsqrt(spread + 1e-8)
    return -(torch.exp(logp - old) * white * mask).sum() / count


def shifted_by_one(logp, old, adv, mask, ref):
    """The advantage of a token meets the mask of the next one."""
    ratio = torch.exp(logp[:, :-1] - old[:, :-1])
    return -(ratio * adv[:, :-1] * mask[:, 1:]).sum() / TOKENS


def switched_off_terms(logp, old, adv, mask, ref):
    """A reference term and an entropy term whose coefficients are zero in this run's config."""
    config = {"beta": 0.0, "entropy": 0.0}
    ratio = torch.exp(logp - logp.detach())
    policy = ratio * adv
    divergence = torch.exp(ref - logp) - (ref - logp) - 1
    per_token = -(policy - config["beta"] * divergence)
    loss = ((per_token * mask).sum(1) / mask.sum(1).clamp(min=1.0)).mean()
    if config["entropy"] > 0:
        loss = loss - config["entropy"] * (logp.exp() * logp * mask).sum()
    return loss
