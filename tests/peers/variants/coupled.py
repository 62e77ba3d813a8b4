"""Losses in which a row without advantage changes what other rows get: never to be proved row by row."""

from __future__ import annotations

import torch

TOKENS = 40.0


def branch_on_all_rows(logp, old, adv, mask, ref):
    """Which surrogate is used depends on the valid tokens of all rows; both are row by row."""
    ratio = (logp - old).exp()
    if (mask * ratio.detach()).sum() > 24.0:
        policy = -ratio.clamp(max=2.0) * adv
    else:
        policy = -adv * logp
    return (policy * mask).sum() / TOKENS


def places_for_uncertain_tokens(logp, old, adv, mask, ref):
    """A fixed number of places for the least likely valid tokens of the microbatch."""
    surprise = (-logp.detach() * mask).flatten()
    picked = torch.topk(surprise, k=12).indices
    policy = -((logp - old).exp() * adv * mask).flatten()
    return policy[picked].sum() / 12


def scaled_by_the_largest(logp, old, adv, mask, ref):
    ratio = (logp - old).exp()
    scale = (ratio.detach() * mask).amax(dim=0, keepdim=True).amax(dim=1, keepdim=True)
    return -(ratio / scale * adv * mask).sum() / TOKENS


def ranked_among_rows(logp, old, adv, mask, ref):
    drift = ((logp - old).detach().abs() * mask).sum(-1)
    weight = drift.argsort().argsort().float() / len(drift)
    return -((logp - old).exp() * adv * mask * weight.unsqueeze(-1)).sum() / TOKENS


def running_over_rows(logp, old, adv, mask, ref):
    before = ((logp - old).detach() * mask).flatten().cumsum(0).view_as(logp)
    return -(before.clamp(-5, 5).exp() * adv * logp * mask).sum() / TOKENS


def neighbour_of_a_row(logp, old, adv, mask, ref):
    beside = (logp.detach() * mask).roll(1, dims=0)
    return -(beside.exp() * adv * logp * mask).sum() / TOKENS


def rows_that_are_valid(logp, old, adv, mask, ref):
    """The mean over rows with any valid token."""
    per_row = (-(logp - old).exp() * adv * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return per_row.sum() / (mask.sum(-1) > 0).sum().clamp(min=1)


def softmax_over_rows(logp, old, adv, mask, ref):
    weight = ((logp * mask).sum(-1)).detach().softmax(0).unsqueeze(-1)
    return -(weight * logp * adv * mask).sum() / TOKENS


def gram_of_rows(logp, old, adv, mask, ref):
    likeness = ((logp * mask).detach() @ (logp * mask).detach().T).tanh().sum(1, keepdim=True)
    return -(likeness * logp * adv * mask).sum() / TOKENS
