"""Which losses let rows move between microbatches."""

import pytest
import torch

from gradprune.errors import PlanError
from gradprune.probe import probe_normaliser


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(6, 5)
    mask[1, 2:] = mask[4, 1:] = 0
    return {"logp": torch.randn(6, 5, generator=generator), "adv": torch.arange(1.0, 7.0), "mask": mask}


def surrogate(logp, adv, mask):
    return -(logp - logp.detach()).exp() * adv[:, None] * mask


def test_global_where_the_denominator_counts_the_step():
    assert (
        probe_normaliser(lambda logp, adv, mask: surrogate(logp, adv, mask).sum() / 512, example(), wrt="logp")
        == "global"
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda logp, adv, mask: surrogate(logp, adv, mask).sum() / mask.sum(),
        lambda logp, adv, mask: (surrogate(logp, adv, mask).sum(1) / mask.sum(1)).mean(),
        lambda logp, adv, mask: surrogate(logp, adv, mask).sum() / len(logp),
        lambda logp, adv, mask: surrogate(logp, adv, mask).sum() / 512 / mask.shape[1],
        lambda logp, adv, mask: surrogate(logp, adv, mask).mean(1).sum() / 64,
    ],
    ids=["token-mean", "sequence-mean", "rows", "width", "mean-over-padding"],
)
def test_microbatch_where_it_counts_the_microbatch(loss):
    assert probe_normaliser(loss, example(), wrt="logp") == "microbatch"
    assert probe_normaliser(loss, tuple(example().values()), wrt="logp") == "microbatch"


@pytest.mark.parametrize(
    "loss",
    [
        lambda logp, adv, mask: surrogate(logp, (adv - adv.mean()) / adv.std(), mask).sum() / 512,
        lambda logp, adv, mask: surrogate(logp, adv - adv.mean(), mask).sum() / 512,
        lambda logp, adv, mask: surrogate(logp, adv, mask).max(0).values.sum(),
    ],
    ids=["batch-normalised-advantage", "batch-centred-advantage", "max-over-rows"],
)
def test_coupled_where_a_row_sees_other_rows(loss):
    assert probe_normaliser(loss, example(), wrt="logp") == "coupled"


def test_a_width_that_never_changes_is_global():
    position = torch.arange(5.0)  # a wider example does not fit
    loss = lambda logp, adv, mask: (surrogate(logp, adv, mask) * position).sum() / logp.shape[1]  # noqa: E731
    assert probe_normaliser(loss, example(), wrt="logp", fixed_width=True) == "global"


def test_rows_without_columns_have_no_width():
    data = {"logp": torch.randn(6), "adv": torch.arange(1.0, 7.0)}
    assert probe_normaliser(lambda logp, adv: (logp * adv).sum() / 512, data, wrt="logp") == "global"


def test_never_global_where_all_rows_share_a_factor():
    """The square of a sum scales all gradients of a microbatch by the sum: no denominator, but the same to a packer."""
    loss = lambda logp, adv, mask: surrogate(logp, adv, mask).sum().square()  # noqa: E731
    assert probe_normaliser(loss, example(), wrt="logp") == "microbatch"


def test_refuses_an_example_that_cannot_tell():
    data = example()
    data["adv"][:2] = 0
    with pytest.raises(PlanError, match="rows 0 to 1 of the example have no gradient"):
        probe_normaliser(lambda logp, adv, mask: surrogate(logp, adv, mask).sum(), data, wrt="logp")
    with pytest.raises(PlanError, match="wrt='other'"):
        probe_normaliser(lambda logp, adv, mask: surrogate(logp, adv, mask).sum(), example(), wrt="other")
    short = {name: value[:2] for name, value in example().items()}
    with pytest.raises(PlanError, match="logp has 2 rows"):
        probe_normaliser(lambda logp, adv, mask: surrogate(logp, adv, mask).sum(), short, wrt="logp")
