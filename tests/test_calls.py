"""Recorded calls and their comparison with a run: what is the same program, and what is not."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from gradprune.calls import CallRecorder, at_line, current_line
from gradprune.facts import SourceLine
from gradprune.trace import trace_joint
from tests.call_watch import CallWatch
from tests.programs import assert_faithful, example, grown, inputs_of, trace, watch

CONFIG = SimpleNamespace()


@pytest.fixture(autouse=True)
def config():
    CONFIG.__dict__.clear()
    CONFIG.__dict__.update(eps=0.2, kl=0.0, scale=2, flag=True, swap=False, extra=False, short=False, detach=False)
    CONFIG.__dict__.update(autocast=False, function=None, coefficient=0.0)
    yield CONFIG


def loss(logp, old, ref, adv, mask):
    first, second = (old, logp) if CONFIG.swap else (logp, old)
    ratio = torch.exp(first - second)
    gain = torch.min(ratio * adv[:, None], ratio.clamp(1 - CONFIG.eps, 1 + CONFIG.eps) * adv[:, None])
    if CONFIG.kl:
        gain = gain - CONFIG.kl * (ref - logp)
    if CONFIG.extra:
        torch.ones(3)
    return -(gain * mask).sum() / mask.sum()


def test_equal_program_matches():
    joints = trace(loss)
    assert watch(loss, joints, example(5)).matched == 0
    assert watch(loss, joints, example(5, rows=7, tokens=3)).matched == 0, "symbolic sizes"
    assert_faithful(loss, joints, example(6))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"eps": 0.3}, "clamp is given 0.7, recorded was 0.8"),
        ({"kl": 0.05}, "recorded was torch.Tensor.mul"),
        ({"swap": True}, "is given another tensor"),
        ({"extra": True}, "torch.ones"),
    ],
    ids=str,
)
def test_changed_python_state_is_a_difference(change, said):
    joints = trace(loss)
    CONFIG.__dict__.update(change)
    comparison = watch(loss, joints, example())
    assert comparison.matched is None
    assert said in comparison.difference
    assert "test_calls.py" in comparison.difference, "the recorded line"


def test_program_that_ends_early_differs():
    def step(logp, adv):
        value = (logp * adv[:, None]).sum()
        return value if CONFIG.short else value * 2

    joints = trace(step)
    CONFIG.short = True
    comparison = watch(step, joints, example())
    assert comparison.matched is None and "ends before torch.Tensor.mul" in comparison.difference


def test_two_results_are_not_confused():
    """Numbering only what is used would make both programs equal."""

    def step(logp, adv):
        one, other = logp * 2, logp * 2
        return ((other if CONFIG.swap else one) * adv[:, None]).sum()

    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    CONFIG.swap = True
    assert watch(step, joints, example()).matched is None


@pytest.mark.parametrize("kind", [1, 1.0, True, -0.0, 0.0, 0])
def test_kinds_of_numbers_differ(kind):
    def step(logp, adv):
        return (logp * adv[:, None]).sum() * CONFIG.scale

    CONFIG.scale = kind
    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    for other in (1, 1.0, True, -0.0, 0.0, 0):
        CONFIG.scale = other
        same = type(other) is type(kind) and str(other) == str(kind)
        assert (watch(step, joints, example()).matched == 0) is same


def test_gradient_mode_is_part_of_a_call():
    def step(logp, adv):
        with torch.set_grad_enabled(not CONFIG.detach):
            doubled = logp * 2
        return (doubled * adv[:, None]).sum() + logp.sum() * 0

    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    CONFIG.detach = True
    assert watch(step, joints, example()).matched is None


def test_autocast_is_part_of_a_call():
    def step(logp, adv):
        with torch.autocast("cpu", torch.bfloat16, enabled=CONFIG.autocast):
            return (logp * adv[:, None]).sum()

    joints = trace(step)
    CONFIG.autocast = True
    assert watch(step, joints, example()).matched is None


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Reverse(Double):
    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_function_with_another_backward_differs():
    def step(logp, adv):
        return (CONFIG.function.apply(logp) * adv[:, None]).sum()

    CONFIG.function = Double
    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    CONFIG.function = Reverse
    comparison = watch(step, joints, example())
    assert comparison.matched is None and "Reverse.apply" in comparison.difference


def test_hook_on_another_value_differs():
    def step(logp, adv):
        scale, doubled = CONFIG.scale, logp * 2
        doubled.register_hook(lambda grad: grad * scale)
        return (doubled * adv[:, None]).sum()

    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    CONFIG.scale = 3
    assert watch(step, joints, example()).matched is None


def test_number_from_data_is_followed():
    """The coefficient on a value read from a tensor is Python state as well."""

    def step(logp, adv, mask):
        return (logp * adv[:, None]).sum() + logp.sum() * (CONFIG.coefficient * mask.sum().item())

    joints = trace(step)
    assert watch(step, joints, example(1)).matched == 0
    CONFIG.coefficient = 1e-3
    assert watch(step, joints, example(1)).matched is None


def test_sizes_computed_in_python_are_followed():
    def step(logp, adv):
        return (logp.view(-1, logp.shape[1] // CONFIG.scale).sum() * adv[0]) / (logp.shape[0] * CONFIG.scale)

    joints = trace(step)
    assert watch(step, joints, example(rows=5, tokens=8)).matched == 0
    CONFIG.scale = 1
    assert watch(step, joints, example(rows=5, tokens=8)).matched is None


def test_python_branch_on_a_size_is_followed():
    def step(logp, adv):
        return (logp * adv[:, None]).sum() * (1 if logp.shape[1] > 3 else 2)

    joints = trace(step)
    assert watch(step, joints, example(tokens=9)).matched == 0
    assert watch(step, joints, example(tokens=3)).matched is None


def test_sizes_outside_the_guards_differ():
    """A broadcast makes another graph with the same calls."""

    def step(logp, other, adv):
        return (logp * other * adv[:, None]).sum()

    logp, adv = torch.randn(4, 6), torch.randn(4)
    joints = trace_joint(step, (logp, torch.randn(4, 6), adv), wrt=("logp",))

    def run(other):
        leaves = {"logp": logp.clone().requires_grad_(), "other": other, "adv": adv}
        comparison = CallWatch([joint.stream for joint in joints], leaves)
        with comparison:
            step(*leaves.values())
        comparison.finish()
        return comparison

    assert run(torch.randn(4, 6)).matched == 0
    assert run(torch.randn(4, 1)).matched is None
    assert "other" in run(torch.randn(4, 6).double()).difference
    assert run(torch.randn(6, 4).T).matched is None, "another layout"


def test_data_sizes_are_followed():
    def step(logp, adv, mask):
        first, second = logp[mask > 0], adv[:, None].expand_as(logp)[mask * CONFIG.scale > 1]
        return (first * second).sum()

    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    values = example()
    (joint,) = joints
    assert any("Eq" in text for text in joint.notes["assumed"])
    one = {**values, "mask": torch.zeros_like(values["mask"])}
    one["mask"][0, 0] = 0.5  # the first selects one token, the second ...
    one["mask"][1, :3] = 0.0
    CONFIG.scale = 2
    assert watch(step, joints, one).matched is None


def test_inputs_in_one_memory():
    """A program that writes to its inputs is another program when they share memory."""

    def step(logp, old, mask, adv):
        if CONFIG.flag:
            old.mul_(2)
        return ((logp - old) * mask * adv[:, None]).sum()

    for writes in (True, False):
        CONFIG.flag = writes
        joints = trace(step)
        values = example()
        assert watch(step, joints, {**values, "old": values["old"].clone()}).matched == 0
        shared = {**values, "mask": values["old"]}
        assert (watch(step, joints, shared).matched == 0) is not writes


def test_one_tensor_under_two_names():
    joints = trace(loss)
    values = example()
    assert watch(loss, joints, {**values, "ref": values["old"]}).matched == 0


OUTSIDE = torch.ones(6, dtype=torch.float64)


def test_state_of_another_shape_differs():
    def step(logp, adv):
        return (logp * CONFIG.state * adv[:, None]).sum()

    CONFIG.state = OUTSIDE
    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    CONFIG.state = torch.full((6,), 3.0, dtype=torch.float64)
    assert watch(step, joints, example()).matched == 0, "its value is unknown to the proof"
    for other in (torch.ones(1, dtype=torch.float64), torch.ones(6), OUTSIDE.clone().requires_grad_()):
        CONFIG.state = other
        assert watch(step, joints, example()).matched is None


def test_numbers_of_arrays_and_lists():
    def step(logp, adv):
        return (logp * torch.tensor(CONFIG.weights, dtype=torch.float64) * adv[:, None]).sum()

    CONFIG.weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    CONFIG.weights = [0.0, *CONFIG.weights[1:]]
    assert watch(step, joints, example()).matched is None


def test_leaves_may_be_bound_late_and_calls_be_paused():
    joints = trace(loss)
    given = grown(inputs_of(loss, example()))
    comparison = CallWatch([joint.stream for joint in joints], [layout.name for layout in joints[0].stream.leaves])
    with comparison:
        with comparison.paused():
            given["logp"] = given["logp"] * 1
            torch.ones(3).sum()
        for name, tensor in given.items():
            comparison.bind(name, tensor)
        loss(*given.values())
    assert comparison.finish() == 0


def test_unbound_leaf_is_a_difference():
    joints = trace(loss)
    given = grown(inputs_of(loss, example()))
    names = list(given)
    comparison = CallWatch([joint.stream for joint in joints], names)
    for name in names[:-1]:
        comparison.bind(name, given[name] * 1 if name == "logp" else given[name])
    with comparison:
        loss(*given.values())
    assert comparison.finish() is None


def test_results_are_handed_out():
    joints = trace(loss)
    index = next(i for i, call in enumerate(joints[0].stream.calls) if call.function == "torch.exp")
    seen = []
    given = {name: value * 1 if name == "logp" else value for name, value in grown(inputs_of(loss, example())).items()}
    comparison = CallWatch([joint.stream for joint in joints], given, {index: seen.append})
    with comparison:
        loss(*given.values())
    assert torch.equal(seen[0], torch.exp(given["logp"] - given["old"]))


def test_error_inside_leaves_no_mode_behind():
    joints = trace(loss)
    comparison = CallWatch([joint.stream for joint in joints], {})
    with pytest.raises(KeyboardInterrupt), comparison:
        raise KeyboardInterrupt
    before = torch.autograd.Function.apply
    assert torch.overrides._get_current_function_mode() is None
    assert torch.autograd.Function.apply == before


def test_recorder_on_real_tensors():
    x = torch.ones(2, 3)
    recorder = CallRecorder({"x": x}, lines=True)
    with recorder:
        y = torch.exp(x)
        assert y.shape == (2, 3) and y.dtype == torch.float32  # questions are no calls
        with recorder.paused():
            torch.ones(3)
        torch.add(y, x, alpha=2)
    assert [call.function for call in recorder.calls] == ["torch.exp", "torch.add"]
    assert recorder.calls[1].operands[2:] == (("tensor", 1), ("tensor", 0), ("value", "alpha="), ("value", 2))
    assert "torch.exp(x)" in recorder.calls[0].where.text


def test_line_of_a_replayed_call():
    where = SourceLine("user.py", 7, "loss = a * b")
    with at_line(where):
        assert current_line() is where
    assert current_line().function == "test_line_of_a_replayed_call"


@pytest.mark.slow
def test_overhead_of_a_watch():
    """Less than 20 us a call, on a machine that does nothing else: measured 6 us."""
    joints = trace(loss)
    streams = [joint.stream for joint in joints]
    given = {name: value * 1 if name == "logp" else value for name, value in grown(inputs_of(loss, example())).items()}

    def seconds(watched):
        best = float("inf")
        for _ in range(200):
            start = time.perf_counter()
            with CallWatch(streams, given) if watched else torch.enable_grad():
                loss(*given.values())
            best = min(best, time.perf_counter() - start)
        return best

    assert (seconds(True) - seconds(False)) / len(streams[0].calls) < 20e-6
