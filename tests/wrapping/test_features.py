"""Training features of torch around a pruned step: what they leave behind is bit for bit what they leave without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradprune
from tests.step.arms import VOCABULARY, Arm, TinyModel, assert_equal, make_batch, outcomes

PATTERN = ("dl", "dd", "ld", "dd")

Batch = dict[str, torch.Tensor]


@dataclass
class Output:
    """What model libraries return: an object with logits, and parts that may be missing."""

    logits: torch.Tensor
    hidden: torch.Tensor
    loss: torch.Tensor | None = None


class Policy(TinyModel):
    """`form` picks what it returns, `checkpointing` how its middle is recomputed."""

    def __init__(self, form: str = "logits", checkpointing: str = "") -> None:
        super().__init__()
        self.form, self.checkpointing = form, checkpointing

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.mix(x)))

    def forward(self, ids: torch.Tensor) -> Any:
        embedded = self.embed(ids)
        if self.checkpointing:
            hidden = checkpoint(self.middle, embedded, use_reentrant=self.checkpointing == "reentrant")
        else:
            hidden = self.middle(embedded)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)
        if self.form == "object":
            return Output(logits, hidden)
        return {"logits": logits, "hidden": hidden} if self.form == "dict" else logits


def token_logps(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def policy_loss(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    ratio, adv = torch.exp((logp - batch["old"]).clamp(-20, 20)), batch["adv"][:, None]
    term = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return (term * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def step(model: Any, batch: Batch) -> torch.Tensor:
    return policy_loss(token_logps(model(batch["ids"]), batch["ids"]), batch)


def step_with_object(model: Any, batch: Batch) -> torch.Tensor:
    return policy_loss(token_logps(model(batch["ids"]).logits, batch["ids"]), batch)


def step_with_dict(model: Any, batch: Batch) -> torch.Tensor:
    return policy_loss(token_logps(model(batch["ids"])["logits"], batch["ids"]), batch)


def step_in_parts(model: Any, batch: Batch) -> torch.Tensor:
    hidden = model.middle(model.embed(batch["ids"]))
    return policy_loss(token_logps(model.head(hidden), batch["ids"]), batch)


def step_row_by_row(model: Any, batch: Batch) -> torch.Tensor:
    logits = torch.cat([model(row[None]) for row in batch["ids"]])
    return policy_loss(token_logps(logits, batch["ids"]), batch)


def step_in_place(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["ids"])
    logits.div_(0.7)
    logits[..., 0] = -1.0
    return policy_loss(token_logps(logits, batch["ids"]), batch)


def step_with_head_weight(model: Any, batch: Batch) -> torch.Tensor:
    hidden = model(batch["ids"])["hidden"]
    return policy_loss(token_logps(hidden @ model.head.weight.T, batch["ids"]), batch)


def step_with_autocast(model: Any, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["ids"])
    return policy_loss(token_logps(logits, batch["ids"]), batch)


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)


def freeze(model: Any) -> None:
    model.embed.requires_grad_(False)


def tie(model: Any) -> None:
    model.head.weight = model.embed.weight


def scale_by_hook(model: Any) -> None:
    model.mix.weight.register_hook(lambda gradient: gradient * 0.5)


def log_by_hook(model: Any) -> None:
    """A hook that counts its calls in a buffer: the pruned run must call it just as often."""
    model.register_buffer("calls", torch.zeros(()))

    def count(parameter: torch.Tensor) -> None:
        model.calls.add_(1)

    model.head.weight.register_post_accumulate_grad_hook(count)


def evaluate(model: Any) -> None:
    model.eval()


def nothing(model: Any) -> None:
    pass


@dataclass(frozen=True)
class Case:
    step: Callable[..., torch.Tensor] = step
    prepare: Callable[[Any], None] = nothing
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    model: Callable[[], torch.nn.Module] = Policy
    clip: bool = False
    scaler: bool = False
    to_none: bool = True
    outcomes: str = "".join(PATTERN)
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "AdamW": Case(),
    "AdamW foreach": Case(optimizer=partial(adamw, foreach=True)),
    "AdamW fused": Case(optimizer=partial(adamw, fused=True)),
    "SGD": Case(optimizer=sgd),
    "Muon": Case(optimizer=muon),
    "gradients kept as zeros": Case(to_none=False),
    "clipping": Case(clip=True),
    "grad scaler and autocast": Case(step_with_autocast, scaler=True, clip=True),
    "checkpoint": Case(model=partial(Policy, checkpointing="plain"), outcomes="lldd" + "lddd"),
    "reentrant checkpoint": Case(model=partial(Policy, checkpointing="reentrant"), outcomes="lldd" + "lddd"),
    "reentrant checkpoint, audited": Case(
        model=partial(Policy, checkpointing="reentrant"), outcomes="dldd" + "lddd", options={"audit": 1.0}
    ),
    "frozen": Case(prepare=freeze),
    "tied": Case(prepare=tie),
    "tensor hook": Case(prepare=scale_by_hook),
    "post-accumulate hook": Case(prepare=log_by_hook),
    "evaluation mode": Case(prepare=evaluate),
    "object": Case(step_with_object, model=partial(Policy, "object")),
    "dict": Case(step_with_dict, model=partial(Policy, "dict")),
    "parts": Case(step_in_parts),
    "several calls": Case(step_row_by_row, prepare=evaluate),
    "in place": Case(step_in_place),
    "head weight in the loss": Case(step_with_head_weight, model=partial(Policy, "dict")),
}


def train(case: Case, compiled: bool) -> Arm:
    torch.manual_seed(0)
    model: Any = case.model()
    case.prepare(model)
    optimizer = case.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaler)
    arm = Arm(step=gradprune.compile(case.step, zero="adv * mask", **case.options) if compiled else case.step)
    for u, letters in enumerate(PATTERN):
        optimizer.zero_grad(set_to_none=case.to_none)
        for m, letter in enumerate(letters):
            loss = arm.step(model, make_batch(4, 6 + m, dead=letter == "d", seed=10 * u + m))
            scaler.scale(loss / len(letters)).backward()
            arm.keep(f"{u}.{m}.loss", loss)
        if case.clip:
            scaler.unscale_(optimizer)
            arm.keep(f"{u}.norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        for name, parameter in model.named_parameters():
            arm.keep(f"{u}.grad.{name}", parameter.grad)
        scaler.step(optimizer)
        scaler.update()
    for name, tensor in model.state_dict().items():
        arm.keep(name, tensor)
    for index, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            arm.keep(f"optimizer.{index}.{name}", torch.as_tensor(value))
    arm.keep("rng", torch.get_rng_state())
    return arm


@pytest.mark.parametrize("name", CASES)
def test_prunes(name):
    case = CASES[name]
    with warnings.catch_warnings(record=True) as unpruned_warnings:
        warnings.simplefilter("always")
        unpruned = train(case, compiled=False)
    with warnings.catch_warnings(record=True) as pruned_warnings:
        warnings.simplefilter("always")
        pruned = train(case, compiled=True)
    assert_equal(pruned, unpruned)
    assert outcomes(pruned) == case.outcomes
    assert {str(item.message) for item in pruned_warnings} <= {str(item.message) for item in unpruned_warnings}


def test_unreached_parameter_stays_none():
    model = Policy()
    pruned = gradprune.compile(step, zero="adv * mask")
    for seed in range(3):
        pruned(model, make_batch(4, 6, dead=True, seed=seed)).backward()
    assert model.unused.grad is None
    assert torch.equal(model.head.weight.grad, torch.zeros(VOCABULARY, 8))


def test_optimizer_in_backward():
    def run(compiled: bool) -> Arm:
        torch.manual_seed(0)
        model = Policy()
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        arm = Arm(step=gradprune.compile(step, zero="adv * mask") if compiled else step)
        for index, letter in enumerate("dlddld"):
            loss = arm.step(model, make_batch(4, 6, dead=letter == "d", seed=index))
            loss.backward()
            arm.keep(f"{index}.loss", loss)
        for name, tensor in model.state_dict().items():
            arm.keep(name, tensor)
        return arm

    pruned = run(True)
    assert_equal(pruned, run(False))
    assert outcomes(pruned) == "dlddld"


def test_keeps_entropy_of_an_object():
    def with_entropy(model: Any, batch: Batch) -> torch.Tensor:
        logits = model(batch["ids"]).logits
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return policy_loss(token_logps(logits, batch["ids"]), batch) - 0.01 * entropy.mean()

    case = Case(with_entropy, model=partial(Policy, "object"))
    with pytest.warns(gradprune_warning()):
        kept = train(case, compiled=True)
    assert_equal(kept, train(case, compiled=False))
    assert outcomes(kept) == "l" * sum(map(len, PATTERN))


def gradprune_warning() -> type[Warning]:
    from gradprune.errors import NoEffectWarning

    return NoEffectWarning


def test_keeps_weight_decay_in_the_loss():
    def decayed(model: Any, batch: Batch) -> torch.Tensor:
        return step(model, batch) + 0.01 * model.head.weight.square().sum()

    with pytest.warns(gradprune_warning()):
        kept = train(Case(decayed), compiled=True)
    assert_equal(kept, train(Case(decayed), compiled=False))
    assert outcomes(kept) == "l" * sum(map(len, PATTERN))
