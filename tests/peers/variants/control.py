"""Losses in which data decides: branches, counts, selections. Most of it feeds the log only."""

from __future__ import annotations

import torch

TOKENS = 40.0


def metrics_behind_branches(logp, old, adv, mask, ref):
    """What is logged depends on counts; the loss does not."""
    metrics, valid = {}, mask.bool()
    ratio = (logp - old).exp()
    count = int(mask.sum().item())
    if count > 0:
        metrics["ratio"] = ratio[valid].mean().item()
        largest = torch.topk(ratio.detach()[valid], k=max(1, count // 10)).values
        metrics["largest"] = largest.mean().item()
    if (adv > 0).any():
        metrics["good"] = (ratio[adv > 0]).mean().item()
    bad = ratio[(adv < 0) & valid]
    metrics["bad"] = bad.mean().item() if bad.numel() else 0.0
    return -(torch.min(ratio * adv, ratio.clamp(0.8, 1.28) * adv) * mask).sum() / TOKENS


def either_way_zero(logp, old, adv, mask, ref):
    """A branch on data that picks another surrogate; the advantage multiplies both."""
    ratio = (logp - old).exp()
    if ratio.detach().max() > 1.3:
        policy = -ratio.clamp(max=2.0) * adv
    else:
        policy = -adv * logp
    return (policy * mask).sum() / TOKENS


def asserted_finite(logp, old, adv, mask, ref):
    """Assertions on data, as a guard against a broken batch."""
    assert torch.isfinite(logp).all(), "log-probabilities are not finite"
    ratio = (logp - old).exp()
    policy = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    loss = -(policy * mask).sum() / mask.sum().clamp(min=1)
    if torch.isnan(loss):
        raise ValueError("the loss is not a number")
    if int(mask.sum().item()) == 0:
        return loss
    summary = {"loss": loss.item(), "best": adv[mask.bool()].max().item()}
    assert summary
    return loss


def count_or_one(logp, old, adv, mask, ref):
    """The denominator is a count, or one where the count is zero."""
    valid = mask.bool()
    count = valid.count_nonzero() or 1
    ratio = torch.where(valid, torch.exp(logp - old), 0)
    first, second = -adv * ratio, -adv * ratio.clamp(0.8, 1.28)
    clipped = (first.detach() < second.detach()).logical_and(valid)
    policy = torch.max(first, second)
    third = torch.sign(adv) * 3.0 * adv
    stats = {"clipped": clipped, "loss": policy.detach()}
    assert stats
    return torch.where(valid, torch.min(policy, third), 0).sum() / count


def largest_advantages(logp, old, adv, mask, ref):
    """Only the tokens with the largest absolute advantage are trained on."""
    size = adv.abs() * mask
    picked = torch.topk(size.flatten(), k=12).indices
    policy = -(torch.exp(logp - old) * adv * mask).flatten()
    return policy[picked].sum() / 12


def uncertain_tokens(logp, old, adv, mask, ref):
    """Tokens above a quantile of the valid tokens' surprise are trained on."""
    surprise = -logp.detach()
    threshold = torch.quantile(surprise[mask.bool()], 0.5)
    chosen = (surprise >= threshold).float() * mask
    ratio = (logp - old).exp()
    policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return (policy * chosen).sum() / chosen.sum().clamp(min=1.0)


def ranked_weights(logp, old, adv, mask, ref):
    """Tokens are weighted by the rank of their ratio in the row."""
    ratio = (logp - old).exp()
    rank = ratio.detach().argsort(dim=1).argsort(dim=1).float()
    weight = 1.0 - rank / rank.shape[1]
    return -(weight * ratio * adv * mask).sum() / TOKENS


def entries_overwritten(logp, old, adv, mask, ref):
    """In-place assignment to a loss matrix at boolean positions."""
    ratio = (logp - old).exp()
    policy = -(ratio * adv)
    policy[mask == 0] = 0.0
    policy[(adv < 0) & (ratio > 3.0)] *= 0.5
    keep = torch.ones_like(adv)
    keep[(adv > 0) & (ratio > 1.28)] = 0.0
    return (policy * keep).sum() / mask.sum().clamp(min=1)


def dropped_at_random(logp, old, adv, mask, ref):
    """A random share of the candidates among the valid tokens is taken out of the loss."""
    candidates = torch.nonzero((mask > 0) & (adv.abs() < 5.0))
    keep = torch.ones_like(adv)
    if len(candidates) > 0:
        order = torch.randperm(len(candidates))
        chosen = candidates[order[: max(1, len(candidates) // 5)]]
        keep[chosen[:, 0], chosen[:, 1]] = 0
    ratio = (logp - old).exp()
    return -(ratio * adv * keep * mask).sum() / TOKENS


def prefix_lengths(logp, old, adv, mask, ref):
    """Rows are cut to their lengths, which are read from the mask as Python integers."""
    total = 0.0
    for row, length in enumerate(mask.sum(dim=1).long().tolist()):
        ratio = (logp[row, :length] - old[row, :length]).exp()
        total = total - (ratio * adv[row, :length]).sum() / max(length, 1)
    return total / logp.shape[0]


def selected_mean(logp, old, adv, mask, ref):
    """The mean of what a mask selects, not a number where it selects nothing."""
    ratio = (logp - old).exp()
    return -torch.masked_select(ratio * adv, mask.bool()).mean()


def number_cleaned(logp, old, adv, mask, ref):
    """Ratios that are not finite are replaced before the advantage multiplies them."""
    log_ratio = logp - old
    log_ratio = torch.where(torch.isfinite(log_ratio), log_ratio, 0.0)
    ratio = torch.nan_to_num(log_ratio.clamp(max=30.0).exp(), nan=0.0, posinf=0.0, neginf=0.0)
    return -(ratio * adv * mask).sum() / TOKENS


def bounded_by_item(logp, old, adv, mask, ref):
    """A clip bound that is a Python float read from data."""
    ratio = (logp - old).exp()
    bound = 1.0 + min(0.5, float(ratio.detach().std().item()))
    return -(torch.min(ratio * adv, ratio.clamp(max=bound) * adv) * mask).sum() / TOKENS
