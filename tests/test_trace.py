"""Joint graphs: who the inputs are, which line made which node, which sizes are symbols, what is refused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradprune.errors import PruneError, TraceError
from gradprune.trace import trace_joint
from tests.programs import assert_faithful, example, trace


def clipped(logp, old, adv, mask):
    ratio = torch.exp(logp - old)
    gain = torch.min(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None])
    return -(gain * mask).sum() / mask.sum()


def line_of(function, text):
    lines = [(number, line) for number, line in enumerate(source(function).splitlines()) if text in line]
    return function.__code__.co_firstlineno + lines[0][0]


def source(function):
    import inspect

    return inspect.getsource(function)


def test_graph_computes_loss_and_gradient():
    assert_faithful(clipped, trace(clipped), example(1))


def test_forward_and_backward_nodes_carry_the_users_line():
    (joint,) = trace(clipped)
    nodes = [node for node in joint.graph_module.graph.nodes if node.op == "call_function"]
    lines = {(node.target, node.meta["where"].line, "call" in node.meta) for node in nodes if node.meta["where"]}
    exp, gain = line_of(clipped, "torch.exp"), line_of(clipped, "clamp")
    assert (torch.ops.aten.exp.default, exp, True) in lines
    assert (torch.ops.aten.le.Scalar, gain, False) in lines, "the mask of clamp's backward belongs to its line"
    missing = [node for node in nodes if node.meta["where"] is None and node.target != torch.ops.aten.sym_size.int]
    assert not missing
    calls = joint.stream.calls
    for node in nodes:
        if "call" in node.meta and node.target == torch.ops.aten.exp.default:
            assert calls[node.meta["call"]].function == "torch.exp"


def test_names_roles_and_gradients():
    batch = {"adv": torch.randn(4), "meta": SimpleNamespace(mask=torch.ones(4, 6))}

    def step(outputs, batch, scale=2.0):
        return {"loss": (outputs["logp"] * batch["adv"][:, None] * batch["meta"].mask).sum() * scale}

    outputs = {"logp": torch.randn(4, 6), "ids": torch.zeros(4, dtype=torch.long), "unused": torch.randn(2)}
    (joint,) = trace_joint(step, (outputs, batch), {"scale": 3.0}, wrt=("outputs",))
    roles = {item.name: item.role for item in joint.inputs}
    assert roles == {
        "outputs.logp": "wrt",
        "outputs.ids": "input",
        "outputs.unused": "wrt",
        "batch.adv": "input",
        "batch.meta.mask": "input",
        "loss": "tangent",
    }
    assert joint.gradients["outputs.unused"] is None
    assert joint.gradients["outputs.logp"] is not None
    assert set(joint.gradients) == {"outputs.logp", "outputs.unused"}


def test_equal_sizes_of_unrelated_inputs_stay_apart():
    def step(logp, other):
        return logp.sum() + other.sum()

    (joint,) = trace_joint(step, (torch.randn(4, 4), torch.randn(4)), wrt=("logp",))
    sizes = [item.node.meta["val"].shape for item in joint.inputs if item.role != "tangent"]
    symbols = {str(size) for shape in sizes for size in shape}
    assert len(symbols) == 3
    assert joint.symbolic == ("logp[0]", "logp[1]", "other[0]")


def test_sizes_that_the_program_compares_become_one():
    (joint,) = trace(clipped)
    by_name = {item.name: item.node.meta["val"] for item in joint.inputs}
    assert by_name["logp"].shape[0].node.expr == by_name["adv"].shape[0].node.expr
    assert "adv[0]" in joint.symbolic


def test_sizes_of_one_are_constants():
    (joint,) = trace(clipped, example(rows=1))
    assert "logp[0]" not in joint.symbolic
    assert "logp[1]" in joint.symbolic


def test_program_that_needs_constant_sizes_gets_them():
    def step(logp, adv):
        return sum((row * gain).sum() for row, gain in zip(logp, adv)) / float(f"{logp.shape[1]}")

    (joint,) = trace(step)
    assert joint.gradients["logp"] is not None


def test_metrics_are_dropped():
    def step(logp, adv):
        metrics = {"std": logp.std(), "max": logp.detach().max()}
        return (logp * adv[:, None]).sum(), metrics

    (joint,) = trace(step)
    targets = {node.target for node in joint.graph_module.graph.nodes}
    assert torch.ops.aten.amax.default not in targets
    assert torch.ops.aten.max.default not in targets


SCALE = torch.full((6,), 2.0, dtype=torch.float64)
WEIGHT = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))


def test_tensor_from_outside_is_state_of_unknown_value():
    def step(logp, adv):
        return (logp * adv[:, None] * SCALE).sum() * SCALE.mean().item()

    (joint,) = trace(step)
    assert [item.name for item in joint.inputs if item.role == "state"] == ["state0"]
    assert not [node for node in joint.graph_module.graph.nodes if node.op == "get_attr"]
    assert_faithful(step, (joint,), example(2), state0=SCALE)


def test_python_constant_keeps_its_value():
    def step(logp, adv):
        return (logp * torch.tensor([0.5] * 6, dtype=torch.float64) * adv[:, None]).sum()

    (joint,) = trace(step)
    constants = [node for node in joint.graph_module.graph.nodes if node.meta.get("constant")]
    assert len(constants) == 1
    assert torch.equal(getattr(joint.graph_module, constants[0].target), torch.full((6,), 0.5, dtype=torch.float64))


def test_array_is_data_not_a_constant():
    array = np.zeros(6)

    def step(logp, adv):
        return (logp * torch.from_numpy(array) * torch.tensor(array) * adv[:, None]).sum()

    (joint,) = trace(step)
    assert len([item for item in joint.inputs if item.role == "state"]) == 2
    assert not [node for node in joint.graph_module.graph.nodes if node.op == "get_attr"]


def test_refuses_gradient_into_a_tensor_from_outside():
    def step(logp, adv):
        return (logp * adv[:, None] * WEIGHT).sum()

    with pytest.raises(TraceError, match="requires grad, enters from outside") as error:
        trace(step)
    assert "WEIGHT" in error.value.where.text


def test_accepts_a_parameter_from_outside_without_gradient():
    def step(logp, adv):
        with torch.no_grad():
            scale = WEIGHT * 2
        return (logp * adv[:, None] * scale * WEIGHT.detach()).sum()

    (joint,) = trace(step)
    assert_faithful(step, (joint,), example(2), state0=WEIGHT.detach())


def test_write_to_a_models_output_is_seen():
    def step(logits, labels, adv):
        logits.div_(0.7)
        return (logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] * adv[:, None]).mean()

    assert_faithful(step, trace(step), example(3))


def test_error_of_the_program_names_its_line():
    def step(logp, old):
        return (logp @ old).sum()  # sizes do not fit

    with pytest.raises(TraceError) as error:
        trace(step)
    assert "logp @ old" in error.value.where.text


def test_wrong_names_are_errors_of_the_call():
    with pytest.raises(PruneError, match=r"wrt=\['logits'\] names no tensor .*: there are logp, adv"):
        trace_joint(lambda logp, adv: logp.sum(), (torch.ones(2), torch.ones(2)), wrt=("logits",))
    with pytest.raises(PruneError, match="1 names for 2 arguments"):
        trace_joint(lambda a, b: a.sum(), (torch.ones(2), torch.ones(2)), names=("a",), wrt=("a",))
    with pytest.raises(PruneError, match="returned a NoneType"):
        trace_joint(lambda a: None, (torch.ones(2),), wrt=("a",))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_gradient_mode_of_the_caller_does_not_matter(around):
    with around():
        (joint,) = trace(clipped)
    assert joint.gradients["logp"] is not None


def test_leaves_random_state_alone():
    def step(logp, adv):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        return (torch.nn.functional.dropout(logp, 0.5) * adv[:, None]).sum() * random.random()

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    trace(step)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


def test_leaves_real_tensors_alone():
    counter = torch.zeros(())

    def step(logp, adv):
        counter.add_(1)
        return (logp * adv[:, None]).sum() * counter

    trace(step)
    assert counter.item() == 0


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        return self.norm(self.inner(x)) * self.frozen


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_of_a_module(device):
    with torch.device(device):
        model = Model()
    batch = {"x": torch.randn(4, 6), "adv": torch.randn(4)}
    (joint,) = trace_joint(
        lambda model, batch: (model(batch["x"]) * batch["adv"][:, None]).sum(), (model, batch), wrt=("model",)
    )
    roles = {item.name: item.role for item in joint.inputs}
    assert roles["model.inner.weight"] == "wrt"
    assert roles["model.frozen"] == "state"
    assert joint.gradients["model.unused.weight"] is None
    assert joint.gradients["model.norm.bias"] is not None
    if device == "cpu":
        assert model.norm.num_batches_tracked == 0, "a trace changes no buffer"


def test_every_module_with_parameters():
    step = lambda a, b, x: b(a(x)).sum()  # noqa: E731
    args = (torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.randn(2, 3))
    (joint,) = trace_joint(step, args, wrt=("parameters",))
    assert set(joint.gradients) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    with pytest.raises(TraceError, match=r"b\.weight, a tensor that requires grad"):
        trace_joint(step, args, wrt=("a",))
