"""Policy losses of the GRPO family, and programs that a careless proof would accept, each with its truth.

Every one has the signature ``loss(logp, old, ref, adv, mask, labels)``: `logp` is [R, T], or [R, T, V] logits for those
named in `ON_LOGITS`; `adv` is [R], or [R, T] for those in `PER_TOKEN`; labels are in ``range(T)``. Truth: whether every
gradient is exactly zero wherever ``adv * mask == 0`` holds at every position, if the side conditions do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Loss = Callable[..., torch.Tensor]
ZERO: dict[str, Loss] = {}
LIVE: dict[str, Loss] = {}
ON_LOGITS: set[str] = set()
PER_TOKEN: set[str] = set()


def zero(loss: Loss) -> Loss:
    ZERO[loss.__name__] = loss
    return loss


def live(loss: Loss) -> Loss:
    LIVE[loss.__name__] = loss
    return loss


def on_logits(loss: Loss) -> Loss:
    ON_LOGITS.add(loss.__name__)
    return loss


def per_token(loss: Loss) -> Loss:
    PER_TOKEN.add(loss.__name__)
    return loss


def over_tokens(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1.0)


def over_rows(x, mask):
    return ((x * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def clipped(ratio, advantage, low=0.2, high=0.2):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def chosen(logits, labels):
    logs = F.log_softmax(logits[:, :-1].float(), dim=-1)
    return logs.gather(-1, labels[:, 1:, None]).squeeze(-1)


# -- the family ----------------------------------------------------------------------------------------------------


@zero
def grpo(logp, old, ref, adv, mask, labels):
    return over_rows(clipped((logp - old).exp(), adv[:, None]), mask)


@live
def grpo_with_kl(logp, old, ref, adv, mask, labels):
    pg = clipped((logp - old).exp(), adv[:, None])
    kl = (ref - logp).exp() - (ref - logp) - 1
    return over_rows(pg + 0.04 * kl, mask)


@zero
def dr_grpo(logp, old, ref, adv, mask, labels):
    return (clipped((logp - old).exp(), adv.unsqueeze(1)) * mask).sum() / (1024 * mask.shape[0])


@zero
def dapo(logp, old, ref, adv, mask, labels):
    ratio, advantage = (logp - old).exp(), adv.unsqueeze(-1).expand_as(logp)
    return over_tokens(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)), mask)


@zero
def dapo_selected(logp, old, ref, adv, mask, labels):
    return clipped((logp - old).exp(), adv[:, None], high=0.28)[mask.bool()].mean()


@zero
def gspo(logp, old, ref, adv, mask, labels):
    ratio = (((logp - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)).exp()
    return -torch.minimum(ratio * adv, ratio.clamp(1 - 3e-4, 1 + 4e-4) * adv).mean()


@zero
def gspo_token(logp, old, ref, adv, mask, labels):
    mean = ((logp - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = (mean.detach() + logp - logp.detach()).exp()
    return over_rows(clipped(ratio, adv[:, None], 3e-4, 4e-4), mask)


@zero
def cispo(logp, old, ref, adv, mask, labels):
    weight = (logp - old).exp().clamp(max=1.28).detach()
    return over_tokens(-weight * adv[:, None] * logp, mask)


@zero
def dual_clip(logp, old, ref, adv, mask, labels):
    advantage = adv[:, None]
    ratio = (logp - old).clamp(-20, 20).exp()
    upper = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return over_tokens(torch.where(advantage < 0, torch.minimum(-3 * advantage, upper), upper), mask)


@zero
def rloo(logp, old, ref, adv, mask, labels):
    return -((logp * mask).sum(-1) * adv).mean()


@zero
@on_logits
def grpo_on_logits(logits, old, ref, adv, mask, labels):
    return over_rows(clipped((chosen(logits, labels) - old[:, 1:]).exp(), adv[:, None]), mask[:, 1:])


@live
@on_logits
def grpo_with_entropy(logits, old, ref, adv, mask, labels):
    logs = F.log_softmax(logits[:, :-1].float(), dim=-1)
    logp = logs.gather(-1, labels[:, 1:, None]).squeeze(-1)
    pg = clipped((logp - old[:, 1:]).exp(), adv[:, None])
    entropy = -(logs.exp() * logs).sum(-1)
    return over_tokens(pg - 0.01 * entropy, mask[:, 1:])


@live
def grpo_with_sft(logp, old, ref, adv, mask, labels):
    pg = over_tokens(clipped((logp - old).exp(), adv[:, None]), mask)
    sft = over_tokens(-logp, mask)
    return pg + 0.1 * sft


@zero
@on_logits
def reinforce_by_cross_entropy(logits, old, ref, adv, mask, labels):
    rows, tokens, vocabulary = logits.shape
    flat = F.cross_entropy(logits[:, :-1].reshape(-1, vocabulary), labels[:, 1:].reshape(-1), reduction="none")
    return (flat.view(rows, tokens - 1) * mask[:, 1:] * adv[:, None]).sum() / mask[:, 1:].sum()


@zero
@on_logits
def truncated_importance(logits, old, ref, adv, mask, labels):
    logits, mask = logits[:, :-1], mask[:, 1:]
    logp = logits.gather(-1, labels[:, 1:, None]).squeeze(-1) - torch.logsumexp(logits, -1)
    logp, old = logp.masked_fill(mask == 0, 0.0), old[:, 1:].masked_fill(mask == 0, 0.0)
    weight = (old - ref[:, 1:]).exp().clamp(max=2.0)
    return over_tokens(clipped((logp - old).exp(), adv[:, None]) * weight, mask)


# -- variations ------------------------------------------------------------------------------------------------------


@zero
def gated_sigmoid(logp, old, ref, adv, mask, labels):
    ratio, advantage = (logp - old).exp(), adv[:, None]
    temperature = torch.where(advantage > 0, 1.0, 1.05)
    return over_rows(-torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage, mask)


@zero
def geometric_mean(logp, old, ref, adv, mask, labels):
    sign = torch.where(adv > 0, 1.0, -1.0)[:, None]
    log_ratio = torch.minimum(sign * (logp - old), sign * (logp - old).clamp(-0.4, 0.4)) * sign
    ratio = ((log_ratio * mask).sum(-1) / (mask.sum(-1) + 1e-8)).exp()
    return -(ratio * adv).mean()


@zero
def per_row_loop(logp, old, ref, adv, mask, labels):
    total = logp.new_zeros(())
    for i in range(3):
        total = total + over_tokens(clipped((logp[i] - old[i]).exp(), adv[i]), mask[i])
    return total / 3


@zero
def chunks_of_tokens(logp, old, ref, adv, mask, labels):
    pieces = [clipped((a - b).exp(), adv[:, None]) for a, b in zip(logp.split(2, 1), old.split(2, 1))]
    return over_tokens(torch.cat(pieces, 1), mask)


@zero
def half_precision(logp, old, ref, adv, mask, labels):
    ratio = (logp.bfloat16() - old.bfloat16()).exp()
    return over_tokens(clipped(ratio, adv.bfloat16()[:, None]).float(), mask)


@zero
def whitened_product(logp, old, ref, adv, mask, labels):
    a = adv[:, None] * mask
    a = (a - a.mean()) * torch.rsqrt(a.var() + 1e-8)
    return (-(logp - old).exp() * a * mask).sum() / mask.sum()


@zero
def gate_of_sign(logp, old, ref, adv, mask, labels):
    return over_tokens(torch.where(adv[:, None] > 0, -logp, torch.zeros_like(logp)), mask)


@zero
def norm_of_product(logp, old, ref, adv, mask, labels):
    return torch.linalg.vector_norm(logp * adv[:, None] * mask)


@zero
def metrics_beside(logp, old, ref, adv, mask, labels):
    with torch.no_grad():
        kl = over_tokens((ref - logp).exp() - (ref - logp) - 1, mask)
        top = logp.flatten().topk(3).values.mean() + kl
    loss = over_tokens(clipped((logp - old).exp(), adv[:, None]), mask)
    return loss + 0.0 * top.detach()


@zero
def put_in_place(logp, old, ref, adv, mask, labels):
    loss = clipped((logp - old).exp(), adv[:, None])
    loss[mask == 0] = 0.0
    loss[:, 0] = loss[:, 0] * 2
    return loss.sum() / logp.shape[0]


@zero
def hinge_of_product(logp, old, ref, adv, mask, labels):
    return F.relu(logp * adv[:, None] * mask).sum()


# -- what a careless proof would accept ------------------------------------------------------------------------------


@live
def normalised_inside(logp, old, ref, adv, mask, labels):
    a = (adv - adv.mean()) / (adv.std() + 1e-6)
    return over_tokens(-(logp - old).exp() * a[:, None], mask)


@live
def normalised_without_epsilon(logp, old, ref, adv, mask, labels):
    a = (adv - adv.mean()) / adv.std()
    return over_tokens(-(logp - old).exp() * a[:, None], mask)


@live
def only_chosen_by_sign(logp, old, ref, adv, mask, labels):
    return over_tokens(torch.where(adv[:, None] > 0, -logp, 0.1 * logp), mask)


@live
def gate_open_at_zero(logp, old, ref, adv, mask, labels):
    return over_tokens(torch.where(adv[:, None] >= 0, -logp, torch.zeros_like(logp)), mask)


@live
def weight_exp(logp, old, ref, adv, mask, labels):
    return over_tokens(-adv.exp()[:, None] * logp, mask)


@live
def weight_softmax(logp, old, ref, adv, mask, labels):
    return over_tokens(-adv.softmax(0)[:, None] * logp, mask)


@live
def largest_product(logp, old, ref, adv, mask, labels):
    return ((logp - old).exp() * adv[:, None] + 0 * mask).max()


@live
def neighbour_row(logp, old, ref, adv, mask, labels):
    return over_tokens(-(logp - old).exp() * adv.roll(1, 0)[:, None], mask)


@live
@per_token
def neighbour_token(logp, old, ref, adv, mask, labels):
    return (-logp[:, :-1] * adv[:, :-1] * mask[:, 1:]).sum() / mask.sum()


@live
def mean_advantage(logp, old, ref, adv, mask, labels):
    weight = (adv[:, None] * torch.ones_like(logp)).sum(-1).mean()
    return over_tokens(-logp * weight, mask)


@live
def mask_as_index(logp, old, ref, adv, mask, labels):
    return (logp.gather(1, mask.long()) * adv[:, None]).sum()


@live
def mask_picks_last_token(logp, old, ref, adv, mask, labels):
    last = mask.sum(-1).long().clamp(min=1) - 1
    return -(logp.gather(1, last[:, None]).squeeze(1) * adv).mean()


@live
def weight_abs_plus(logp, old, ref, adv, mask, labels):
    return over_tokens(-logp * (adv.abs() + 1e-3)[:, None], mask)


@live
def divided_by_advantage(logp, old, ref, adv, mask, labels):
    return (logp * mask / adv[:, None]).sum()


@live
def root_of_square(logp, old, ref, adv, mask, labels):
    return ((logp * adv[:, None] * mask) ** 2).sum().sqrt()


@live
def masked_out_decay(logp, old, ref, adv, mask, labels):
    pg = over_tokens(-logp * adv[:, None], mask)
    return pg + 0.01 * ((1 - mask) * logp**2).mean()


@live
def step_at_zero(logp, old, ref, adv, mask, labels):
    return over_tokens(-logp * torch.heaviside(adv, torch.ones(()))[:, None], mask)


@live
def power_zero(logp, old, ref, adv, mask, labels):
    return over_tokens(-logp * (adv**0)[:, None], mask)


@live
def weight_log(logp, old, ref, adv, mask, labels):
    return over_tokens(-logp * (adv.abs() + 1e-8).log()[:, None], mask)


@live
def leave_one_out(logp, old, ref, adv, mask, labels):
    a = adv - (adv.sum() - adv) / (adv.shape[0] - 1)
    return -(a * (logp * mask).sum(-1)).mean()


@live
def sorted_advantages(logp, old, ref, adv, mask, labels):
    return over_tokens(-logp * adv.sort().values[:, None], mask)


@live
@per_token
def return_to_go(logp, old, ref, adv, mask, labels):
    g = adv.flip(1).cumsum(1).flip(1)
    return -(g * logp * mask).sum()


@live
@per_token
def transposed_by_reshape(logp, old, ref, adv, mask, labels):
    a = adv.t().reshape(adv.shape)
    return -(a * logp * mask).sum()


@live
def first_row_for_all(logp, old, ref, adv, mask, labels):
    return over_tokens(-logp * adv[:1, None], mask)


@live
@per_token
def first_token_mask(logp, old, ref, adv, mask, labels):
    return -(logp * adv * mask[:, :1]).sum()


@live
def cosine_weight(logp, old, ref, adv, mask, labels):
    return over_tokens(-logp * adv.cos()[:, None], mask)


@live
def critic(logp, old, ref, adv, mask, labels):
    pg = over_tokens(clipped((logp - old).exp(), adv[:, None]), mask)
    value = over_tokens((logp - ref) ** 2, mask)
    return pg + value


@live
def written_term(logp, old, ref, adv, mask, labels):
    loss = clipped((logp - old).exp(), adv[:, None])
    worst = (logp - old).abs().flatten().topk(2).indices
    rows, columns = worst // logp.shape[1], worst % logp.shape[1]
    loss[rows, columns] = (ref - logp)[rows, columns]
    return over_tokens(loss, mask)
