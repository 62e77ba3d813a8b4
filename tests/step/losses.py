"""GRPO-family losses on token log-probs, written from the papers' formulas, and terms that keep a microbatch live.

Each takes ``(logp, batch, select)``; `select(x, batch)` masks a per-token term by product, by where or by index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
Select = Callable[[torch.Tensor, Batch], torch.Tensor]


def by_product(term: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (term * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def by_where(term: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.where(batch["mask"] > 0, term, 0.0).sum() / batch["mask"].sum().clamp(min=1)


def by_index(term: torch.Tensor, batch: Batch) -> torch.Tensor:
    return term[batch["mask"].bool()].sum() / batch["mask"].sum().clamp(min=1)


def by_sequence(term: torch.Tensor, batch: Batch) -> torch.Tensor:
    return ((term * batch["mask"]).sum(-1) / batch["mask"].sum(-1).clamp(min=1)).mean()


def ratio_of(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.exp((logp - batch["old"]).clamp(-20, 20))


def grpo(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    ratio, adv = ratio_of(logp, batch), batch["adv"][:, None]
    return select(-torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv), batch)


def dr_grpo(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    ratio, adv = ratio_of(logp, batch), batch["adv"][:, None]
    term = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return select(term, batch) * batch["mask"].sum().clamp(min=1) / (logp.shape[0] * 32)


def dapo(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    ratio, adv = ratio_of(logp, batch), batch["adv"].unsqueeze(-1).expand_as(logp)
    return select(torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.28)), batch)


def gspo(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    mask = batch["mask"]
    log_ratio = ((logp - batch["old"]) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(log_ratio.clamp(-20, 20)).expand_as(logp)
    adv = batch["adv"][:, None]
    return select(-torch.min(ratio * adv, ratio.clamp(0.9, 1.1) * adv), batch)


def cispo(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    weight = ratio_of(logp, batch).clamp(max=1.28).detach()
    return select(-weight * batch["adv"][:, None] * logp, batch)


def dual_clip(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    ratio, adv = ratio_of(logp, batch), batch["adv"][:, None]
    clipped = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    return select(torch.where(adv < 0, torch.minimum(-adv * 3.0, clipped), clipped), batch)


def rloo(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    return -(batch["adv"] * (logp * batch["mask"]).sum(-1)).mean()


def reinforce(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    return select(-logp * batch["adv"][:, None], batch)


POLICY = [grpo, dr_grpo, dapo, gspo, cispo, dual_clip, rloo, reinforce]
SELECT = [by_product, by_where, by_index, by_sequence]


# Terms and twists that give a microbatch of zero advantages a gradient ----------------------------------------------


def kl(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    gap = batch["old"] - logp
    return 0.05 * select(torch.exp(gap.clamp(-20, 20)) - gap - 1, batch)


def entropy(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    return 0.01 * select(logp.exp() * logp, batch)


def nll(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    return 0.1 * select(-logp, batch)


def batch_normalised(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    adv = batch["adv"] + torch.arange(len(batch["adv"]))
    adv = (adv - adv.mean()) / (adv.std() + 1e-6)
    return select(-logp * adv[:, None], batch)


def where_not_negative(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    return select(torch.where(batch["adv"][:, None] >= 0, -logp, 0.0), batch)


def exponential(logp: torch.Tensor, batch: Batch, select: Select) -> torch.Tensor:
    return select(-logp * torch.exp(batch["adv"])[:, None], batch)


LIVE = [kl, entropy, nll, batch_normalised, where_not_negative, exponential]


class Loss:
    """A policy loss with a way to mask, and any of the live terms: ``loss(model, batch) -> (loss, metrics)``."""

    def __init__(self, policy: Any, select: Select = by_product, extra: Any = None) -> None:
        self.policy, self.select, self.extra = policy, select, extra

    def __call__(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = model(batch["ids"])
        logp = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
        loss = self.policy(logp, batch, self.select)
        if self.extra is not None:
            loss = loss + self.extra(logp, batch, self.select)
        with torch.no_grad():
            metrics = {"ratio": ratio_of(logp, batch).mean(), "logp": (logp * batch["mask"]).sum()}
        return loss, metrics
