"""A re-packed step, pruned against unpruned: bit-equal. Against another packing: equal up to the order of the sum."""

import copy

import pytest
import torch

import gradprune
from gradprune.planner import StepPlan

VOCABULARY, ROWS = 11, 32


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens))).log_softmax(-1)


def step(model, batch):
    logp = model(batch["tokens"]).gather(-1, batch["tokens"][..., None]).squeeze(-1)
    ratio = torch.exp(logp - batch["old"])
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * batch["advantages"][:, None], clipped * batch["advantages"][:, None])
    return (loss * batch["mask"]).sum() / (ROWS * 12)


@pytest.fixture(scope="module")
def rollout():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 13, (ROWS,), generator=generator)
    rewards = torch.tensor([0.0, 1.0]).repeat(ROWS // 2).view(-1, 4)
    rewards[::2] = 1.0  # every second group of four is all right
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    data = {
        "tokens": torch.randint(0, VOCABULARY, (ROWS, 12), generator=generator),
        "old": -2.4 + 0.1 * torch.randn(ROWS, 12, generator=generator),
        "mask": (torch.arange(12) < lengths[:, None]).float(),
        "advantages": advantages,
    }
    torch.manual_seed(0)
    return lengths, data, Model()


@pytest.fixture(scope="module")
def compiled():
    return gradprune.compile(step, zero="advantages * mask")


def gradients(rollout, plan: StepPlan, run, rank: int = 0, dtype=torch.float32):
    """Gradients of one rank's microbatches under `run`, a step."""
    _, data, model = rollout
    model = copy.deepcopy(model).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    data = {name: value.to(dtype) if value.is_floating_point() else value for name, value in data.items()}
    batches = [{name: value[list(item.samples)] for name, value in data.items()} for item in plan.ranks[rank]]
    for batch in plan.bind(batches, rank=rank):
        run(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def make_plan(rollout, **limits) -> StepPlan:
    lengths, data, _ = rollout
    return StepPlan.build(lengths, data["advantages"], data["mask"], **{"token_budget": 48, "ranks": 2, **limits})


@pytest.mark.parametrize("limits", [{}, {"padded": True}, {"microbatch_size": 4}, {"num_microbatches": 3}])
def test_pruned_equals_unpruned_bit_for_bit_under_one_plan(rollout, compiled, limits):
    plan = make_plan(rollout, **limits)
    before = compiled.report().microbatches_dead
    for rank in range(2):
        pairs = zip(gradients(rollout, plan, compiled, rank), gradients(rollout, plan, step, rank))
        assert all(torch.equal(one, two) for one, two in pairs)
    dead = sum(item.dead for item in plan.microbatches)
    assert compiled.report().microbatches_dead - before == dead > 0, str(compiled.explain())
    assert any(not item.dead for item in plan.microbatches)


UNEVEN = {"microbatch_size": 4, "token_budget": 60, "ranks": 3, "lockstep": True}  # some fillers run live


@pytest.mark.parametrize(
    "limits", [{"padded": True}, {"microbatch_size": 4}, {"padded": True, "multiple_of": 4}, UNEVEN]
)
def test_the_report_tells_tokens_from_padding(rollout, compiled, limits):
    """Batches are 12 slots wide, whatever their sequences; a filler is one masked slot."""
    lengths, data, model = rollout
    plan = make_plan(rollout, **{"token_budget": 60, **limits})
    before = compiled.report()
    filler = {name: torch.zeros_like(value[:1, :1] if value.ndim > 1 else value[:1]) for name, value in data.items()}
    for rank, items in enumerate(plan.ranks):
        batches = [
            filler if item.filler else {name: value[list(item.samples)] for name, value in data.items()}
            for item in items
        ]
        for batch in plan.bind(batches, rank=rank):
            compiled(model, batch).backward()
    after, slots = compiled.report(), 12 * ROWS + sum(item.filler for item in plan.microbatches)
    counts = ("tokens_live", "tokens_dead", "padding_live", "padding_dead", "fillers")
    live, dead, *padding, fillers = (getattr(after, name) - getattr(before, name) for name in counts)
    assert live + dead == lengths.sum() and dead == plan.dead_row_tokens
    assert sum(padding) == slots - lengths.sum() and min(padding) > 0
    assert fillers == sum(item.filler for item in plan.microbatches)
    assert limits is not UNEVEN or any(item.filler and not item.dead for item in plan.microbatches)
    metrics = after.metrics("perf/")
    assert metrics["perf/padding/live"] == after.padding_live and metrics["perf/tokens/dead"] == after.tokens_dead


def test_another_packing_keeps_the_sum_up_to_its_order(rollout):
    """The stated tolerance of the reordering tier: n terms summed in another order, n * eps of the sum of sizes.

    In float64 that is 4224 terms * 2.2e-16 = 1e-12 of gradients below 1.
    """
    apart = make_plan(rollout, ranks=1)
    together = StepPlan.from_rollout(rollout[1]["advantages"], rollout[1]["mask"], 4)
    pairs = [gradients(rollout, plan, step, dtype=torch.float64) for plan in (apart, together)]
    assert not all(torch.equal(one, two) for one, two in zip(*pairs)), "the order of the sum should show in some bit"
    assert all((one - two).abs().max() <= 1e-12 for one, two in zip(*pairs))
