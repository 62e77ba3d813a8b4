"""Refusals name the line where the live term joins, or where a factor is lost or misplaced."""

from __future__ import annotations

import pytest
import torch

from gradprune.facts import Hypothesis, Refusal
from gradprune.passes.zero_flow import analyse
from gradprune.trace import trace_joint
from tests.passes import losses
from tests.passes.test_losses import verdict

# loss -> kind of the first reason, a piece of its line, and of a line among the reasons through which gradient flows
LINES = {
    "grpo_with_kl": ("live-term", "pg + 0.04 * kl", "kl = (ref - logp).exp()"),
    "grpo_with_entropy": ("live-term", "pg - 0.01 * entropy", "F.log_softmax(logits[:, :-1]"),
    "grpo_with_sft": ("live-term", "pg + 0.1 * sft", "sft = over_tokens(-logp, mask)"),
    "critic": ("live-term", "pg + value", "(logp - ref) ** 2"),
    "masked_out_decay": ("live-term", "pg + 0.01 * ((1 - mask)", "(1 - mask) * logp**2"),
    "written_term": ("live-term", "loss[rows, columns] =", "(ref - logp)[rows, columns]"),
    "largest_product": ("live-term", "+ 0 * mask).max()", ".max()"),
    "normalised_inside": ("lost-factor", "a = (adv - adv.mean()) / (adv.std() + 1e-6)", "a[:, None], mask)"),
    "normalised_without_epsilon": ("lost-factor", "a = (adv - adv.mean()) / adv.std()", "a[:, None], mask)"),
    "gate_open_at_zero": ("lost-factor", "torch.where(adv[:, None] >= 0", "-logp"),
    "weight_exp": ("lost-factor", "adv.exp()", "* logp"),
    "weight_softmax": ("lost-factor", "adv.softmax(0)", "* logp"),
    "weight_abs_plus": ("lost-factor", "adv.abs() + 1e-3", "-logp"),
    "weight_log": ("lost-factor", "(adv.abs() + 1e-8).log()", "-logp"),
    "cosine_weight": ("lost-factor", "adv.cos()", "-logp"),
    "power_zero": ("lost-factor", "(adv**0)", "-logp"),
    "step_at_zero": ("lost-factor", "torch.heaviside(adv", "-logp"),
    "divided_by_advantage": ("lost-factor", "/ adv[:, None]", "logp * mask"),
    "leave_one_out": ("lost-factor", "a = adv - (adv.sum() - adv)", "(a * (logp * mask)"),
    "neighbour_row": ("misaligned", "adv.roll(1, 0)", "adv.roll(1, 0)"),
    "mean_advantage": ("lost-factor", "weight = (adv[:, None]", "-logp * weight"),
    "sorted_advantages": ("lost-factor", "adv.sort()", "-logp"),
    "return_to_go": ("lost-factor", "adv.flip(1).cumsum(1)", "g * logp * mask"),
    "transposed_by_reshape": ("lost-factor", "adv.t().reshape", "a * logp * mask"),
    "mask_as_index": ("lost-factor", "logp.gather(1, mask.long())", "logp.gather"),
    "mask_picks_last_token": ("lost-factor", "logp.gather(1, last[:, None])", "logp.gather"),
    "neighbour_token": ("misaligned", "adv[:, :-1] * mask[:, 1:]", "-logp[:, :-1]"),
    "first_row_for_all": ("misaligned", "adv[:1, None]", "-logp"),
    "first_token_mask": ("misaligned", "mask[:, :1]", "logp * adv"),
    "root_of_square": ("non-finite", ".sqrt()", ".sqrt()"),
    "only_chosen_by_sign": ("live-term", "torch.where(adv[:, None] > 0, -logp, 0.1 * logp)", "0.1 * logp"),
}


def test_every_live_loss_is_listed() -> None:
    assert LINES.keys() == losses.LIVE.keys()


@pytest.mark.parametrize("name", LINES)
def test_names_the_line(name: str) -> None:
    (refusal,) = verdict(name)
    assert isinstance(refusal, Refusal)
    kind, piece, through = LINES[name]
    first = refusal.reasons[0]
    assert first.where is not None
    assert first.where.file.endswith("losses.py")
    assert (first.kind, piece in first.where.text) == (kind, True), str(refusal)
    assert any(through in reason.where.text for reason in refusal.reasons if reason.where), str(refusal)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-3


@torch.library.custom_op("gradprune_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@opaque.register_fake
def _(x):
    return torch.empty_like(x)


def noisy_function(x, adv):
    y = Noisy.apply(x)
    return (y * adv).sum()


def noisy_hook(x, adv):
    y = x * 1
    y.register_hook(lambda gradient: gradient + 1e-3)
    return (y * adv).sum()


def unknown_operator(x, adv):
    weight = opaque(adv)
    return (x * weight).sum()


def empty_mean(x, adv):
    return (x * adv).sum() * adv[:0].mean()


MADE = {
    noisy_function: ("live-term", "the backward of this line adds gradient of its own", "Noisy.apply(x)"),
    noisy_hook: ("live-term", "the backward of this line adds gradient of its own", ""),
    unknown_operator: ("no-rule", "kept: no rule for gradprune_tests.opaque.default", "weight = opaque(adv)"),
    empty_mean: ("non-finite", "never finite here", "adv[:0].mean()"),
}


@pytest.mark.parametrize("loss", MADE, ids=lambda loss: loss.__name__)
def test_names_what_is_made_outside_of_the_loss(loss) -> None:
    kind, message, piece = MADE[loss]
    joints = trace_joint(loss, (torch.randn(3, 2), torch.randn(3, 1)), names=("x", "adv"), wrt=("x",))
    refusal = analyse(joints[0], {"adv": "adv"}, hypothesis=Hypothesis(("adv",)))
    assert isinstance(refusal, Refusal)
    first = refusal.reasons[0]
    assert first.kind == kind, str(refusal)
    assert message in first.message
    assert first.where is not None
    assert piece in first.where.text


def test_says_what_a_factor_is_where_it_is_lost() -> None:
    (refusal,) = verdict("weight_exp")
    assert refusal.reasons[0].message == "this equals 1, not 0, where 'adv' is 0"


def test_reads_as_prose() -> None:
    (refusal,) = verdict("grpo_with_kl")
    first, second, *_ = str(refusal).splitlines()
    assert first == "refused: gradient of grpo_with_kl may flow although adv * mask == 0 at every position"
    assert second.startswith("  a term joins that 'adv' does not multiply   at ")
    assert second.endswith("return over_rows(pg + 0.04 * kl, mask)")
