"""Run a training loop twice from one seed, decorated and not, and compare everything that it leaves behind."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import gradprune
from tests.step.arms import TinyModel, make_batch

Batch = dict[str, torch.Tensor]
ZERO = "batch['adv'] * batch['mask']"


@dataclass
class Arm:
    """One run. log: what the loop wrote down, in order. left: tensors that it left behind, by name."""

    log: list[Any]
    left: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    function: Any = None

    @property
    def outcomes(self) -> str:
        """One letter a microbatch: d for dead, l for live."""
        return "".join("l" if decision.outcome else "d" for decision in self.function.explain().decisions)


@dataclass
class Training:
    """What the loops of these tests are given: model, optimizer, data, and a log that both arms must write alike."""

    model: TinyModel
    optimizer: torch.optim.Optimizer
    batches: list[Batch]
    log: list[Any]


def make_batches(pattern: str, rows: int = 3, tokens: int = 4, seed: int = 0) -> list[Batch]:
    """One batch a letter of the pattern, dead for d."""
    return [make_batch(rows, tokens, dead=letter == "d", seed=seed + index) for index, letter in enumerate(pattern)]


def train(
    loop: Callable[[Training], Any],
    pattern: str,
    *,
    decorate: bool,
    zero: str = ZERO,
    take: int | None = None,
    strict: bool = True,
    **options: Any,
) -> Arm:
    """Run `loop` on the batches of a pattern; an exception that it raises is its result.

    take: how many items of a generator to take before it is closed; None for all.
    """
    torch.manual_seed(0)
    model = TinyModel(width=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    training = Training(model, optimizer, make_batches(pattern), [])
    function = gradprune.grpo_loop(zero, strict=strict, **options)(loop) if decorate else loop
    arm = Arm(training.log, function=function)
    try:
        arm.result = _drain(function(training), take)
    except Exception as error:  # noqa: BLE001  both arms must raise the same
        arm.result = (type(error), str(error))
    for name, parameter in model.named_parameters():
        arm.left[name] = parameter.detach().clone()
        arm.left[f"grad.{name}"] = None if parameter.grad is None else parameter.grad.clone()
    arm.left.update((name, buffer.clone()) for name, buffer in model.named_buffers())
    for index, state in enumerate(optimizer.state.values()):
        arm.left.update((f"optimizer.{index}.{name}", torch.as_tensor(value)) for name, value in state.items())
    arm.left["rng"] = torch.get_rng_state()
    return arm


def _drain(result: Any, take: int | None) -> Any:
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    if not inspect.isgenerator(result):
        return result
    taken = list(itertools.islice(result, take))
    result.close()
    return taken


def assert_equal(decorated: Arm, plain: Arm) -> None:
    """The one comparison: same result and log, same names, None where None, and the same bits."""
    assert _same(decorated.result, plain.result), f"{decorated.result} instead of {plain.result}"
    assert len(decorated.log) == len(plain.log)
    for index, (one, other) in enumerate(zip(decorated.log, plain.log)):
        assert _same(one, other), f"log[{index}]: {one} instead of {other}"
    assert decorated.left.keys() == plain.left.keys()
    for name, value in plain.left.items():
        assert _same(decorated.left[name], value), f"{name}: {decorated.left[name]} instead of {value}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Not a number equals itself here: a loss that is not finite must be so in both arms, at the same places.
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, type(other)) and one == other


def compare(loop: Callable[[Training], Any], pattern: str, *, take: int | None = None, **options: Any) -> Arm:
    """Both arms, compared; the decorated one."""
    decorated = train(loop, pattern, decorate=True, take=take, **options)
    assert_equal(decorated, train(loop, pattern, decorate=False, take=take))
    return decorated


def token_logps(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [R, T] of tokens 1.. of ids [R, T + 1]."""
    return torch.log_softmax(model(ids)[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def policy_loss(logp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The clipped surrogate, a mean over the mask. adv [R], the others [R, T]."""
    ratio = torch.exp(logp - old)
    surrogate = torch.min(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None])
    return -(surrogate * mask).sum() / mask.sum().clamp(min=1)


def batch_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return policy_loss(token_logps(model, batch["ids"]), batch["old"], batch["adv"], batch["mask"])
