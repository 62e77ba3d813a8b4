"""Random inputs of the losses of this folder."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.passes import losses

Batch = dict[str, torch.Tensor]


def draw(name: str, seed: int, rows: int = 3, tokens: int = 5, vocabulary: int = 6) -> Batch:
    """A batch for the loss `name`; scales differ by seed, some masks are zero, some advantages."""
    gen = torch.Generator().manual_seed(seed)
    scale = (0.3, 1.0, 3.0)[seed % 3]
    shape = (rows, tokens, vocabulary) if name in losses.ON_LOGITS else (rows, tokens)
    adv = torch.randn((rows, tokens) if name in losses.PER_TOKEN else (rows,), generator=gen)
    adv[torch.rand(adv.shape, generator=gen) < 0.3] = 0
    return {
        "logits" if name in losses.ON_LOGITS else "logp": scale * torch.randn(shape, generator=gen),
        "old": scale * torch.randn(rows, tokens, generator=gen),
        "ref": scale * torch.randn(rows, tokens, generator=gen),
        "adv": adv,
        "mask": (torch.rand(rows, tokens, generator=gen) > 0.4).float(),
        "labels": torch.randint(0, min(tokens, vocabulary), (rows, tokens), generator=gen),
    }


def silenced(batch: Batch, seed: int) -> Batch:
    """The batch with one factor set to zero wherever neither is: ``adv * mask == 0`` at every position."""
    gen = torch.Generator().manual_seed(seed)
    adv, mask = batch["adv"].clone(), batch["mask"].clone()
    by_adv = torch.rand(adv.shape, generator=gen) < 0.5
    adv[by_adv] = 0
    live = adv if adv.dim() == 2 else adv[:, None]
    mask[(live != 0).expand_as(mask)] = 0
    return {**batch, "adv": adv, "mask": mask}


def gradient(loss: losses.Loss, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradient with respect to the first input; zeros where autograd reaches nothing."""
    leaf, *others = batch.values()
    leaf = leaf.clone().requires_grad_()
    result = loss(leaf, *(other.clone() for other in others))
    (grad,) = torch.autograd.grad(result, leaf, allow_unused=True) if result.requires_grad else (None,)
    return torch.zeros_like(leaf) if grad is None else grad
