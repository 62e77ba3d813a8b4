"""Losses that weigh whole rows, and packed batches."""

from __future__ import annotations

import torch

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def lists_of_samples(logp, old, adv, mask, ref):
    """Every sample is its own tensor; the loss is a sum of their means, as with a data iterator of samples."""
    samples = list(zip(logp.unbind(0), old.unbind(0), adv.unbind(0), mask.unbind(0)))
    gaps = torch.cat([before - now for now, before, _adv, _mask in samples])
    weights = torch.cat([gain for _now, _before, gain, _mask in samples])
    ratio = (-gaps).exp()
    policy = torch.maximum(-ratio * weights, -ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * weights)
    parts = policy.split([len(now) for now, *_rest in samples])
    return sum((part * valid).sum() / valid.sum().clamp_min(1) for part, (*_rest, valid) in zip(parts, samples))


def sequence_gap_per_sample(logp, old, adv, mask, ref):
    """One ratio a sample, spread over its tokens with ``expand_as``."""
    gaps = []
    for now, before, valid in zip(logp, old, mask):
        gap = ((before - now) * valid).sum() / torch.clamp_min(valid.sum(), 1)
        gaps.append(gap.expand_as(now))
    ratio = (-torch.cat(gaps)).exp()
    weights, valid = adv.reshape(-1), mask.reshape(-1)
    policy = torch.maximum(-ratio * weights, -ratio.clamp(0.9997, 1.0004) * weights)
    return (policy * valid).sum() / valid.sum().clamp_min(1)


def samples_off_policy_dropped(logp, old, adv, mask, ref):
    """A sample with a negative advantage that has drifted too far is masked out, and counted."""
    keeps, dropped = [], torch.tensor(0.0)
    for now, before, gain, valid in zip(logp, old, adv, mask):
        drift = ((before - now) * valid).sum() / torch.clamp_min(valid.sum(), 1)
        drop = ((gain < 0) & (drift > 0.05)).float() * valid
        dropped += drop.sum() / torch.clamp_min(valid.sum(), 1)
        keeps.append(1 - drop)
    keep = torch.stack(keeps)
    ratio = (logp - old).exp()
    policy = -ratio * adv * keep
    return ((policy * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() + 0 * dropped.detach()


def sequence_ratio_with_token_gradient(logp, old, adv, mask, ref):
    """The row's geometric-mean ratio as a value, the token's log-probability as a gradient."""
    row = ((logp - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    log_weight = (logp - logp.detach() + row.detach()).clamp(max=10.0)
    ratio = log_weight.exp()
    policy = torch.max(-adv * ratio, -adv * ratio.clamp(1 - 3e-4, 1 + 4e-4))
    per_row = torch.where(mask.bool(), policy, 0.0).sum(-1) / (mask.sum(-1) + 1e-8)
    return (per_row * (mask.sum(-1) > 0)).sum() / 6.0


def kept_tokens_per_sample(logp, old, adv, mask, ref):
    """Boolean indexing in every sample, a ratio band, and a least ratio that masks the whole sample."""
    total, kept = 0, []
    for now, before, gain, valid in zip(logp, old, adv, mask.bool()):
        log_ratio = now - before
        ratio = log_ratio.exp()
        outside = (ratio < 0.125) | (ratio > 8.0)
        outside = outside | (ratio.masked_fill(~valid, torch.inf).min() < 1e-3)
        keep = valid & ~outside
        total = total + (-ratio * gain)[keep].sum()
        mismatch = ratio - log_ratio - 1
        kept.append(mismatch[keep].sum() / torch.clamp_min(keep.sum(), 1))
    metrics = {"mismatch": torch.stack(kept)}
    assert metrics
    return total / 40


def sequence_ratio_by_selection(logp, old, adv, mask, ref):
    """A sample's log-ratio is the sum over the selected tokens, clamped and detached."""
    total = 0
    for now, before, gain, valid in zip(logp, old, adv, mask.bool()):
        row = (now - before)[valid].sum()
        log_ratio = torch.clamp(now - now.detach() + row.detach(), max=10.0)
        total = total + (-log_ratio.exp() * gain)[valid].sum() / torch.clamp_min(valid.sum(), 1)
    return total / logp.shape[0]


def packed_segments(logp, old, adv, mask, ref):
    """All rows in one line with cumulative lengths; sums per segment by ``index_add``."""
    rows, tokens = logp.shape
    bounds = torch.arange(0, rows * tokens + 1, tokens)
    ids = torch.repeat_interleave(torch.arange(rows), bounds[1:] - bounds[:-1], output_size=rows * tokens)
    gap = ((logp - old) * mask).reshape(-1)
    counts = torch.zeros(rows).index_add(0, ids, mask.reshape(-1))
    ratio = (torch.zeros(rows).index_add(0, ids, gap) / counts.clamp(min=1)).exp()[ids]
    weights, valid = adv.reshape(-1), mask.reshape(-1)
    policy = -torch.min(ratio * weights, ratio.clamp(0.8, 1.2) * weights)
    return torch.zeros(rows).index_add(0, ids, policy * valid).div(counts.clamp(min=1)).mean()


def packed_mean_advantage(logp, old, adv, mask, ref):
    """Packed, and every token gets the mean advantage of its segment's valid tokens, by ``scatter_add``."""
    rows, tokens = logp.shape
    ids = torch.arange(rows).repeat_interleave(tokens)
    valid, zeros = mask.reshape(-1).bool(), torch.zeros(rows)
    count = zeros.scatter_add(0, ids, valid.float()).clamp(min=1)
    gain = zeros.scatter_add(0, ids, torch.where(valid, adv.reshape(-1), 0.0)) / count
    gap = zeros.scatter_add(0, ids, torch.where(valid, (logp - old).reshape(-1), 0.0)) / count
    policy = torch.where(valid, -gap.exp()[ids] * gain[ids], 0.0)
    return policy.sum() / (valid.count_nonzero() or 1)


def packed_row_advantage(logp, old, adv, mask, ref):
    """Packed, with one advantage a sequence gathered to its tokens."""
    rows, tokens = logp.shape
    ids = torch.arange(rows).repeat_interleave(tokens)
    gain = adv[:, 0][ids]
    ratio = (logp - old).reshape(-1).exp()
    return -(torch.min(ratio * gain, ratio.clamp(0.8, 1.28) * gain) * mask.reshape(-1)).sum() / 40.0


def segments_by_slice(logp, old, adv, mask, ref):
    """Packed, and each sequence is a slice between two cumulative lengths that are Python integers."""
    tokens = logp.shape[1]
    line = [tensor.reshape(-1) for tensor in (logp, old, adv, mask)]
    total = 0.0
    for start in range(0, logp.numel(), tokens):
        now, before, gain, valid = (tensor[start : start + tokens] for tensor in line)
        row = ((now - before) * valid).sum() / valid.sum().clamp(min=1)
        total = total - (row.exp() * (gain * valid).sum())
    return total / logp.shape[0]


def rows_in_another_order(logp, old, adv, mask, ref):
    """Rows are drawn in random order, everything with the same permutation."""
    order = torch.randperm(logp.shape[0])
    ratio = torch.exp(logp[order] - old[order])
    policy = -torch.min(ratio * adv[order], ratio.clamp(0.8, 1.2) * adv[order])
    return (policy * mask[order]).sum() / mask.sum().clamp(min=1)


def rows_by_advantage(logp, old, adv, mask, ref):
    """Advantages are sorted among the rows, the rest is not: right only where all of them are zero."""
    ordered = adv.sort(dim=0).values
    return -((logp - old).exp() * ordered * mask).sum() / 40.0


def leave_one_out(logp, old, adv, mask, ref):
    """The baseline of a row is the mean of the others, taken inside the loss."""
    gain = adv[:, 0]
    baseline = (gain.sum() - gain) / max(len(gain) - 1, 1)
    sequence = (logp * mask).sum(-1)
    return -((gain - baseline) * sequence).mean()
