"""Which inputs no result reads."""

from __future__ import annotations

import torch

from gradprune.passes.dead_inputs import Unread, unread_inputs
from gradprune.trace import trace_joint

LOGP, REF, MASK = torch.randn(3, 4), torch.randn(3, 4), torch.ones(3, 4)


def unread(loss) -> Unread:
    return unread_inputs(trace_joint(loss, (LOGP, REF, MASK), names=("logp", "ref", "mask"), wrt=("logp",))[0])


def penalised(coefficient):
    def loss(logp, ref, mask):
        kl = (ref - logp).exp() - (ref - logp) - 1
        return ((logp + coefficient * kl) * mask).sum() / mask.sum()

    return loss


def test_finds_reference_that_is_multiplied_by_zero() -> None:
    found = unread(penalised(0.0))
    assert found.names == ("ref",)
    assert "finite" in {condition.kind for condition in found.conditions}


def test_keeps_reference_that_is_multiplied() -> None:
    assert unread(penalised(0.1)).names == ()


def test_finds_reference_that_is_never_used() -> None:
    found = unread(lambda logp, ref, mask: (logp * mask).sum())
    assert found == Unread(("ref",), ())


def test_finds_reference_of_which_only_the_size_is_read() -> None:
    found = unread(lambda logp, ref, mask: (logp * mask).sum() / ref.shape[0])
    assert found == Unread(("ref",), ())


def test_keeps_reference_that_only_chooses() -> None:
    assert unread(lambda logp, ref, mask: torch.where(ref > 0, logp, 2 * logp).sum()).names == ("mask",)


def test_keeps_reference_read_by_the_loss_alone() -> None:
    assert unread(lambda logp, ref, mask: (logp * mask).sum() + ref.sum()).names == ()
