"""Random losses: no claim at any node is false, and what is proved has a zero gradient in autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch

from gradprune.errors import TraceError
from gradprune.facts import Hypothesis
from gradprune.passes.zero_flow import Program, analyse
from gradprune.trace import trace_joint
from tests.passes.batches import gradient
from tests.passes.claims import Checker, Unsound, check_rows, holds, run_graph
from tests.passes.programs import Tensors, draw_inputs, draw_program

HYPOTHESIS = Hypothesis(("adv", "mask"))
FACTORS = {"adv": "adv", "mask": "mask"}


def silenced(inputs: Tensors, seed: int) -> Tensors:
    """One factor zero wherever neither is."""
    gen = torch.Generator().manual_seed(seed)
    adv, mask = inputs["adv"].clone(), inputs["mask"].clone()
    adv[torch.rand(adv.shape, generator=gen) < 0.5] = 0
    mask[(adv.reshape(adv.shape[0], -1) != 0).expand_as(mask)] = 0
    return {**inputs, "adv": adv, "mask": mask}


def judge(seed: int, count: Counter[str]) -> None:
    """Trace, analyse and check one random loss. Raises Unsound."""
    loss, kind, text = draw_program(seed)
    example = draw_inputs(kind, seed)
    try:
        joints = trace_joint(loss, tuple(example.values()), names=tuple(example), wrt=("x",))
    except TraceError:
        count["untraceable"] += 1
        return
    joint = joints[0]
    count["programs"] += 1
    program = Program.of(joint, FACTORS, HYPOTHESIS)
    whole, by_row = program.run(rowwise=False, whole=True), program.run(rowwise=True, whole=True)
    verdict = analyse(joint, FACTORS, hypothesis=HYPOTHESIS)
    count["proved" if verdict else "refused"] += 1
    nonzero = False
    for draw in range(3):
        inputs = draw_inputs(kind, seed + 17 * draw, *((3, 4), (4, 4), (5, 3))[draw])
        dead = silenced(inputs, draw)
        try:
            values = run_graph(joint, dead)
        except (RuntimeError, IndexError):
            continue  # the path that was traced is not the path of these sizes
        factors = {factor: dead[factor] for factor in FACTORS}
        count["claims"] += Checker(whole, values, factors).check()
        grad = gradient(loss, dead)
        nonzero |= bool((grad != 0).any())
        if verdict and len(joints) == 1 and "dropout" not in text:
            node = joint.gradients["x"]
            held = node is None or all(holds(need, values) for need in whole.values[node].const.needs)
            count["gradients"] += held
            if held and not torch.equal(grad, torch.zeros_like(grad)):
                raise Unsound(f"proved, but the gradient is {grad.flatten()[:8].tolist()}: {text}")
        values = run_graph(joint, inputs)
        count["claims"] += Checker(by_row, values, {factor: inputs[factor] for factor in FACTORS}).check()
        other = draw_inputs(kind, seed + 1000, *inputs["mask"].shape)
        changed = {name: torch.cat([value[:1], other[name][1:2], value[2:]]) for name, value in inputs.items()}
        if "dropout" in text:
            continue
        try:
            others = run_graph(joint, changed)
        except (RuntimeError, IndexError):
            continue  # an index that is data leaves what is there
        count["row claims"] += check_rows(by_row, values, others, 1)
    count["refused though zero"] += not verdict and not nonzero


def run(seeds: Iterable[int]) -> Counter[str]:
    count: Counter[str] = Counter()
    for seed in seeds:
        try:
            judge(seed, count)
        except Unsound as error:
            raise Unsound(f"seed {seed}, {draw_program(seed)[2]}: {error}") from error
    return count


def test_claims_nothing_false_of_random_losses() -> None:
    count = run(range(30))
    assert count["programs"] >= 20
    assert count["claims"] > 5000
    assert count["proved"] >= 3
    assert count["refused"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", range(10))
def test_claims_nothing_false_of_many_random_losses(share: int) -> None:
    count = run(range(1000 + 600 * share, 1600 + 600 * share))
    print(dict(count))
    assert count["programs"] >= 500
