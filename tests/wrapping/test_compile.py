"""Pruned and unpruned training of one compiled step: the same bits, one graph more, no break and no recompile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import gradprune
from gradprune.backend import explain
from gradprune.errors import NoEffectWarning, PruneError
from gradprune.runtime.dead import Delivery
from tests.step.arms import VOCABULARY, Arm, assert_equal, make_batch, outcomes
from tests.wrapping.test_features import Batch, policy_loss, token_logps

PATTERN = ("dl", "dd", "ld", "dd")


class Middle(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(x))


class Policy(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.middle = Middle(width)
        self.norm = torch.nn.LayerNorm(width)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(width, VOCABULARY)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.dropout(self.middle(self.embed(ids)))))


def step(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logp = token_logps(model(batch["ids"]), batch["ids"])
    with torch.no_grad():
        kl = ((batch["old"] - logp) * batch["mask"]).mean()
    return policy_loss(logp, batch), kl


def step_with_entropy(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["ids"])
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    return policy_loss(token_logps(logits, batch["ids"]), batch) - 0.01 * entropy, entropy.detach()


Compile = Callable[[Any, str], tuple[Any, Any]]


def whole(model: Any, backend: str) -> tuple[Any, Any]:
    return model, torch.compile(step, backend=backend, dynamic=True)


def model_only(model: Any, backend: str) -> tuple[Any, Any]:
    return torch.compile(model, backend=backend, dynamic=True), step


def model_in_place(model: Any, backend: str) -> tuple[Any, Any]:
    model.compile(backend=backend, dynamic=True)
    return model, step


def layer_in_place(model: Any, backend: str) -> tuple[Any, Any]:
    model.middle.compile(backend=backend, dynamic=True)
    return model, step


def loss_only(model: Any, backend: str) -> tuple[Any, Any]:
    loss = torch.compile(policy_loss, backend=backend, dynamic=True)

    def with_compiled_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return loss(logp, batch), logp.detach().mean()

    return model, with_compiled_loss


class LossModule(torch.nn.Module):
    def forward(self, logp: torch.Tensor, batch: Batch) -> torch.Tensor:
        return policy_loss(logp, batch)


def loss_module(model: Any, backend: str) -> tuple[Any, Any]:
    class Trainer:
        def __init__(self) -> None:
            self._loss = torch.compile(LossModule(), backend=backend, dynamic=True)

        def step(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            logp = token_logps(model(batch["ids"]), batch["ids"])
            return self._loss(logp, batch), logp.detach().mean()

    return model, Trainer().step


def own_backend(model: Any, backend: str, function: Any = step) -> tuple[Any, Any]:
    options = {"zero": "adv * mask", "backend": backend}
    return model, torch.compile(function, backend="gradprune", dynamic=True, options=options)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train(compile_parts: Compile, backend: str, *, pruned: bool, **options: Any) -> Arm:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1)
    model, compiled = compile_parts(policy, backend)
    arm = Arm(step=gradprune.compile(compiled, zero="adv * mask", **options) if pruned else compiled)
    for u, letters in enumerate(PATTERN):
        optimizer.zero_grad()
        for m, letter in enumerate(letters):
            loss, metric = arm.step(model, make_batch(4, 6 + 2 * m + u, dead=letter == "d", seed=10 * u + m))
            loss.backward()
            arm.keep(f"{u}.{m}.loss", loss)
            arm.keep(f"{u}.{m}.{letter}.metric", metric)
        for name, parameter in policy.named_parameters():
            arm.keep(f"{u}.grad.{name}", parameter.grad)
        optimizer.step()
    for name, parameter in policy.named_parameters():
        arm.keep(name, parameter)
    arm.keep("rng", torch.get_rng_state())
    return arm


def compiled_graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


TRIED = "l" + "".join(PATTERN)[1:]  # what a compiled model does in its backward is seen, once, in a trial


@pytest.mark.parametrize(
    ("parts", "graphs", "expected"),
    [
        (whole, 2, "".join(PATTERN)),
        (model_only, 2, TRIED),
        (model_in_place, 2, TRIED),
        (layer_in_place, 1, TRIED),  # within a model that is not compiled, its live graph serves both
        (loss_only, 2, "".join(PATTERN)),
        (loss_module, 2, "".join(PATTERN)),
    ],
)
def test_prunes_with_few_graphs(parts, graphs, expected):
    unpruned = train(parts, "aot_eager", pruned=False)
    assert compiled_graphs() == 1
    pruned = train(parts, "aot_eager", pruned=True)
    assert compiled_graphs() == graphs
    assert_equal(pruned, unpruned)
    assert outcomes(pruned) == expected


def test_prunes_inductor():
    unpruned = train(whole, "inductor", pruned=False)
    pruned = train(whole, "inductor", pruned=True)
    assert compiled_graphs() == 2
    for arm in (pruned, unpruned):  # of a dead microbatch, another graph computes them, and may round otherwise
        arm.values = {name: value for name, value in arm.values.items() if not name.endswith(".d.metric")}
    assert_equal(pruned, unpruned)
    assert outcomes(pruned) == "".join(PATTERN)


def test_audits_a_compiled_step():
    unpruned = train(whole, "aot_eager", pruned=False)
    pruned = train(whole, "aot_eager", pruned=True, audit=1.0)
    assert_equal(pruned, unpruned)
    assert outcomes(pruned) == "".join(PATTERN)
    assert compiled_graphs() == 1


def test_keeps_entropy_in_a_compiled_step():
    def parts(model: Any, backend: str) -> tuple[Any, Any]:
        return model, torch.compile(step_with_entropy, backend=backend, dynamic=True)

    unpruned = train(parts, "aot_eager", pruned=False)
    with pytest.warns(NoEffectWarning, match="refused"):
        kept = train(parts, "aot_eager", pruned=True)
    assert compiled_graphs() == 1
    assert_equal(kept, unpruned)
    assert outcomes(kept) == "l" * 8


def test_keeps_a_coefficient_that_is_switched_on():
    settings = {"entropy": 0.0}

    def switched(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, entropy = step_with_entropy(model, batch) if settings["entropy"] else step(model, batch)
        return loss, entropy

    model, arms = Policy(), []
    compiled = torch.compile(switched, backend="aot_eager", dynamic=True)
    pruned = gradprune.compile(compiled, zero="adv * mask")
    for coefficient in (0.0, 0.01, 0.0):
        settings["entropy"] = coefficient
        for each in (compiled, pruned):
            torch.manual_seed(5)
            model.zero_grad()
            each(model, make_batch(4, 6, dead=True, seed=1))[0].backward()
            arms.append(model.head.weight.grad.clone())
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(arms[::2], arms[1::2]))
    assert arms[2].any()
    assert "".join("l" if decision.outcome else "d" for decision in pruned.explain().decisions) == "dld"


def test_dead_graph_saves_nothing():
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    pruned = gradprune.compile(torch.compile(step, backend="aot_eager", dynamic=True), zero="adv * mask")
    model = Policy()
    pruned(model, make_batch(4, 6, dead=True, seed=0))[0].backward()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pruned(model, make_batch(4, 7, dead=True, seed=1))[0].backward()
    assert not saved


@pytest.mark.parametrize("parts", [model_only, model_in_place, layer_in_place])
def test_zeros_go_to_parameters_only(parts, monkeypatch):
    """And to nothing that was put into the graph for a compiled model: on a GPU it would be waited for."""
    reached: list[list[torch.Tensor]] = []

    class Noted(Delivery):
        def __init__(self, parameters: Any, *args: Any, **options: Any) -> None:
            super().__init__(parameters, *args, **options)
            reached.append(self._parameters)

    monkeypatch.setattr("gradprune.runtime.pruner.Delivery", Noted)
    policy = Policy()
    model, function = parts(policy, "aot_eager")
    pruned = gradprune.compile(function, zero="adv * mask", allow_sync=True)
    for seed in range(4):
        pruned(model, make_batch(2, 4, dead=True, seed=seed))[0].backward()
    assert len(reached) >= 3
    expected = {id(parameter) for name, parameter in policy.named_parameters() if name != "unused"}
    assert all({id(tensor) for tensor in tensors} == expected for tensors in reached)


def test_backend_prunes_within_one_capture():
    unpruned = train(whole, "aot_eager", pruned=False)
    before = len(explain())
    pruned = train(own_backend, "aot_eager", pruned=False)
    assert compiled_graphs() == 1
    assert_equal(pruned, unpruned)
    (explanation,) = explain()[before:]
    letters = "".join("l" if decision.outcome else "d" for decision in explanation.decisions)
    assert letters == "l" + "".join(PATTERN)[1:]
    assert "which parameters are reached" in explanation.decisions[0].outcome.reason
    assert explanation.verdicts[0]


def test_backend_proves_each_capture_by_itself():
    settings = {"extra": False}

    def switched(model: Any, batch: Batch) -> torch.Tensor:
        logits = model(batch["ids"])
        loss = policy_loss(token_logps(logits, batch["ids"]), batch)
        return loss - 0.01 * logits.log_softmax(-1).mean() if settings["extra"] else loss

    model = Policy()
    _, compiled = own_backend(model, "aot_eager", switched)
    gradients = []
    before = len(explain())
    for extra in (False, False, True, False):
        settings["extra"] = extra
        model.zero_grad()
        with pytest.warns(NoEffectWarning) if extra else nullcontext():
            compiled(model, make_batch(4, 6, dead=True, seed=1)).backward()
        gradients.append(model.head.weight.grad)
    assert [bool(gradient.any()) for gradient in gradients] == [False, False, True, False]
    proved, refused = explain()[before:]
    assert bool(proved.verdicts[0]) and not refused.verdicts[0]
    assert proved.dead == 2


def test_backend_keeps_advantages_that_flow_elsewhere():
    def shifted(model: Any, batch: Batch) -> torch.Tensor:
        logp = token_logps(model(batch["ids"]), batch["ids"])
        return -(logp[:-1] * batch["adv"][1:, None] * batch["mask"][:-1]).sum() + logp.mean()

    _, compiled = own_backend(None, "aot_eager", shifted)
    with pytest.warns(NoEffectWarning, match="live"):
        compiled(Policy(), make_batch(4, 6, dead=True, seed=1)).backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass options="),
        ({"options": {"zero": "adv * mask", "speed": 2}}, "no others than"),
        ({"options": {"zero": "adv + mask"}}, "not a product of names"),
        ({"mode": "reduce-overhead"}, "does not pass it on"),
    ],
)
def test_backend_refuses_bad_options(arguments, message):
    def call() -> None:
        torch.compile(step, backend="gradprune", **arguments)(Policy(), make_batch(4, 6, dead=True, seed=1))

    with pytest.raises((PruneError, RuntimeError), match=message):
        call()
