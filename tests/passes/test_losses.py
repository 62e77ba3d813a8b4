"""Verdicts on known losses, against numeric gradients; every claim at every node against real values."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gradprune.facts import Certificate, Hypothesis
from gradprune.joint import JointGraph
from gradprune.passes.zero_flow import Program, analyse
from gradprune.trace import trace_joint
from tests.passes import losses
from tests.passes.batches import draw, gradient, silenced
from tests.passes.claims import Checker, check_rows, holds, run_graph

HYPOTHESIS = Hypothesis(("adv", "mask"))
FACTORS = {"adv": "adv", "mask": "mask"}
SEEDS = range(6)
SIZES = ((3, 5), (3, 2), (3, 3))
SIZES_OF = {"chunks_of_tokens": ((3, 5),), "reinforce_by_cross_entropy": ((3, 5), (3, 4), (3, 3))}
"""Where a program decides by its sizes, those that take the path of the example."""
LOSSES = {**losses.ZERO, **losses.LIVE}


@cache
def traced(name: str) -> tuple[JointGraph, ...]:
    batch = draw(name, 0)
    return trace_joint(LOSSES[name], tuple(batch.values()), names=tuple(batch), wrt=(next(iter(batch)),))


def verdict(name: str):
    return [analyse(joint, FACTORS, hypothesis=HYPOTHESIS, subject=name) for joint in traced(name)]


@pytest.mark.parametrize("name", losses.ZERO)
def test_proves_zero(name: str) -> None:
    assert all(verdict(name)), "\n".join(map(str, verdict(name)))
    for seed in SEEDS:
        grad = gradient(losses.ZERO[name], silenced(draw(name, seed), seed))
        assert torch.equal(grad, torch.zeros_like(grad)) or not grad.isfinite().all()


@pytest.mark.parametrize("name", losses.LIVE)
def test_keeps_live(name: str) -> None:
    assert not any(verdict(name))
    found = [gradient(losses.LIVE[name], silenced(draw(name, seed), seed)) for seed in SEEDS]
    assert any((grad != 0).any() for grad in found)


@pytest.mark.parametrize("name", losses.ZERO)
def test_claims_that_conditions_hold_where_the_gradient_is_zero(name: str) -> None:
    """On ordinary data no condition fires for nothing."""
    for seed in SEEDS:
        batch = silenced(draw(name, seed), seed)
        if not gradient(losses.ZERO[name], batch).isfinite().all():
            continue
        for joint in traced(name):
            program = Program.of(joint, FACTORS, HYPOTHESIS)
            flow, values = program.run(rowwise=False), run_graph(joint, batch)
            for node in joint.gradients.values():
                assert all(holds(need, values) for need in flow.values[node].const.needs)


@pytest.mark.parametrize("name", LOSSES)
def test_claims_are_true(name: str) -> None:
    for joint in traced(name):
        program = Program.of(joint, FACTORS, HYPOTHESIS)
        whole, by_row = program.run(rowwise=False, whole=True), program.run(rowwise=True, whole=True)
        for seed in SEEDS:
            sizes = SIZES_OF.get(name, SIZES)
            rows, tokens = sizes[seed % len(sizes)]
            batch = draw(name, seed, rows, tokens)
            dead = silenced(batch, seed)
            factors = {factor: dead[factor] for factor in FACTORS}
            assert Checker(whole, run_graph(joint, dead), factors).check() > 20
            before = run_graph(joint, batch)
            assert Checker(by_row, before, {factor: batch[factor] for factor in FACTORS}).check() > 20
            other = draw(name, seed + 100, rows, tokens)
            changed = {key: _with_row(value, other[key], 1) for key, value in batch.items()}
            assert check_rows(by_row, before, run_graph(joint, changed), 1) > 3


def _with_row(value: torch.Tensor, other: torch.Tensor, row: int) -> torch.Tensor:
    value = value.clone()
    value[row] = other[row]
    return value


@pytest.mark.parametrize("name", losses.ZERO)
def test_rows_are_zero_by_themselves(name: str) -> None:
    """Where the certificate says so, a row without product has no gradient, whatever the others hold."""
    if not all(isinstance(v, Certificate) and v.per_row for v in verdict(name)):
        return
    for seed in SEEDS:
        batch = draw(name, seed)
        adv = batch["adv"] if batch["adv"].dim() == 2 else batch["adv"][:, None]
        dead = (adv * batch["mask"] == 0).all(1)
        grad = gradient(losses.ZERO[name], batch)
        if grad.isfinite().all():
            assert (grad[dead] == 0).all()


def test_says_which_rows_are_coupled() -> None:
    coupled = {"dapo", "whitened_product", "norm_of_product", "dapo_selected", "cispo"}
    apart = {"grpo", "dr_grpo", "gspo", "rloo", "gspo_token"}
    for name in coupled | apart:
        assert all(isinstance(v, Certificate) and v.per_row == (name in apart) for v in verdict(name)), name
