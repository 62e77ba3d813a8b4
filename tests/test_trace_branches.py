"""Programs that branch on data: every path is traced, none is guessed."""

from __future__ import annotations

import math

import pytest
import torch

from gradprune.errors import TraceError
from tests.programs import assert_faithful, example, inputs_of, run, trace, watch


def tensor_condition(logp, adv, mask):
    if mask.sum() > 3:
        return (logp * adv[:, None] * mask).sum()
    return logp.sum() * 0


def counted(logp, adv, mask):
    count = mask.sum().item()
    return (logp * adv[:, None] * mask).sum() / count if count > 0 else logp.sum() * 0


def selected(logp, adv, mask):
    chosen = (logp * adv[:, None])[mask > 0]
    return chosen.mean() if chosen.numel() > 0 else logp.sum()


def selected_by_len(logp, adv, mask):
    chosen = (logp * adv[:, None])[mask > 0]
    return chosen.mean() if len(chosen) else logp.sum() * 2


def top_k(logp, adv, mask):
    k = max(1, int(0.5 * mask.sum().item()))
    values, _ = torch.topk((logp * adv[:, None]).flatten(), k)
    return values.mean()


def slice_bound(logp, adv, mask):
    longest = int(mask.sum(-1).max().item())
    return (logp[:, :longest] * adv[:, None]).sum()


def or_default(logp, adv, mask):
    count = mask.count_nonzero() or 1
    return (logp * adv[:, None] * mask).sum() / count


def comparison(logp, old, adv):
    if torch.equal(logp, old):
        return (logp * adv[:, None]).sum()
    return (logp * adv[:, None]).sum() * (2 if torch.allclose(logp, old) else 3)


def nested(logp, adv, mask):
    loss = (logp * adv[:, None]).sum()
    if (mask > 0).any():
        loss = loss * 2 if adv.sum() > 0 else loss * 3
    return loss


def kinds_of_numbers(logp, adv, mask):
    number, size = mask.sum().item(), logp.shape[0]
    known = isinstance(number, float) and isinstance(size, int) and isinstance(number, (int, float))
    return (logp * adv[:, None]).sum() * (1.0 if known else 0.0)


def lists(logp, adv, mask):
    lengths = mask.sum(-1).long().tolist()
    return (logp * adv[:, None]).sum() / sum(lengths)


def data_number(logp, adv, mask):
    return (logp * adv[:, None]).sum() * (0.1 * mask.sum().item() + 1) * int(mask.sum())


PATHS = {
    tensor_condition: 2,
    counted: 2,
    selected: 2,
    selected_by_len: 2,
    top_k: 1,
    slice_bound: 1,
    or_default: 2,
    comparison: 3,
    nested: 3,
    kinds_of_numbers: 1,
    lists: 1,
    data_number: 1,
}


@pytest.mark.parametrize("program", PATHS, ids=lambda program: program.__name__)
def test_traces_every_path(program):
    joints = trace(program)
    assert len(joints) == PATHS[program]
    values = example()
    cases = [
        values,
        example(1),
        {**values, "mask": torch.zeros_like(values["mask"])},
        {**values, "old": values["logp"]},
    ]
    for case in cases[:2] if program is top_k else cases:
        if program not in (lists,) or case["mask"].any():
            assert_faithful(program, joints, case)


def test_branches_are_told_with_their_lines():
    joints = trace(tensor_condition)
    told = {text: where.line for joint in joints for text, where in joint.branches}
    line = tensor_condition.__code__.co_firstlineno + 1
    assert told == {"if mask.sum() > 3: -> True": line, "if mask.sum() > 3: -> False": line}


def test_equal_questions_get_one_answer():
    def step(logp, adv, mask):
        loss = (logp * adv[:, None]).sum()
        if mask.sum() > 3:
            loss = loss * 2
        if mask.sum() > 3:
            loss = loss * 3
        return loss

    assert len(trace(step)) == 2


def test_contradictions_of_counts_are_no_paths():
    def step(logp, adv, mask):
        count = mask.count_nonzero().item()
        loss = (logp * adv[:, None]).sum()
        if count > 5 and count < 3:
            raise AssertionError("no count is both")
        return loss / count if count > 0 else loss

    assert not any(joint.notes["raises"] for joint in trace(step))


def test_not_less_is_not_greater_with_nan():
    """NaN is neither below nor above: both may be false, and that path must be there."""

    def step(logp, adv, mask):
        level = (mask.sum() / mask.sum()).item()
        if level > 0.5:
            return (logp * adv[:, None]).sum()
        if level <= 0.5:
            return (logp * adv[:, None]).sum() * 2
        return (logp * adv[:, None]).sum() * 3

    joints = trace(step)
    assert len(joints) == 3
    values = example()
    assert_faithful(step, joints, {**values, "mask": torch.zeros_like(values["mask"])})


def test_path_that_raises_is_dropped():
    def step(logp, adv, mask):
        assert not torch.isnan(logp).any()
        if mask.sum() == 0:
            raise ValueError("empty")
        return (logp * adv[:, None]).sum()

    (joint,) = trace(step)
    raises = [text for path in joint.notes["raises"] for text, _ in path]
    assert "if mask.sum() == 0: -> True" in raises


def test_program_that_always_raises():
    def step(logp, mask):
        if mask.sum() > 0:
            raise ValueError("one")
        raise ValueError("other")

    with pytest.raises(TraceError, match="raises, whatever its data"):
        trace(step)


def test_number_of_paths_is_limited():
    def step(logp, adv, mask):
        loss = (logp * adv[:, None]).sum()
        for row in range(3):
            loss = loss * 2 if mask[row, 0] > 0 else loss
        return loss

    with pytest.raises(TraceError, match="more than 4 paths") as error:
        trace(step, max_paths=4)
    assert "mask[row, 0] > 0" in error.value.where.text
    assert len(trace(step, max_paths=8)) == 8


def test_loop_count_from_data_is_refused():
    def step(logp, mask):
        loss = logp.sum()
        for _ in range(int(mask.sum())):
            loss = loss * 2
        return loss

    with pytest.raises(TraceError, match="only data can tell") as error:
        trace(step)
    assert "range(int(mask.sum()))" in error.value.where.text


def test_caught_refusal_does_not_choose_a_branch():
    """A program that catches what only a trace raises must not be traced down its except clause."""

    def step(logp, adv, mask):
        try:
            factor = float(mask.numpy().sum())
        except Exception:  # noqa: BLE001 - what programs do
            factor = 0.0
        return (logp * adv[:, None]).sum() * factor

    with pytest.raises(TraceError, match="the data of a tensor"):
        trace(step)


def test_globals_of_the_program_are_restored():
    before = dict(globals())
    trace(top_k)
    assert dict(globals()) == before
    assert isinstance(int("3"), int) and len([1]) == 1


def test_math_of_a_data_number():
    def step(logp, adv, mask):
        level = mask.mean().item()
        if not math.isfinite(level):
            return (logp * adv[:, None]).sum() * 2
        return (logp * adv[:, None]).sum() * math.exp(level)

    joints = trace(step)
    assert len(joints) == 2
    targets = [{node.target for node in joint.graph_module.graph.nodes} for joint in joints]
    assert sum(math.exp in found for found in targets) == 1


def test_largest_of_two_numbers_is_no_branch():
    def step(logp, adv, mask):
        rows = [
            (row[: int(length)] * gain).sum() / max(length, 1)
            for row, length, gain in zip(logp, mask.sum(-1).long().tolist(), adv)
        ]
        return sum(rows)

    joints = trace(step)
    assert len(joints) == 1
    values = example()
    empty = torch.cat([torch.zeros(1, 6, dtype=torch.float64), torch.ones(3, 6, dtype=torch.float64)])
    for mask in (torch.ones_like(values["mask"]), empty):
        assert_faithful(step, joints, {**values, "mask": mask})


def test_values_of_the_example_decide_nothing():
    values = example()
    empty = {**values, "mask": torch.zeros_like(values["mask"])}
    for case in (values, empty):
        assert len(trace(counted, case)) == 2


def test_run_follows_the_path_of_its_data():
    joints = trace(counted)
    values = example()
    taken = {watch(counted, joints, case).matched for case in (values, {**values, "mask": values["mask"] * 0})}
    assert taken == {0, 1}
    loss, grads = run(counted, {**values, "mask": values["mask"] * 0})
    assert loss == 0 and not grads["logp"].any()
    assert inputs_of(counted, values).keys() == {"logp", "adv", "mask"}
