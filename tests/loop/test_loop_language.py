"""What Python means in a decorated function: scopes, control flow, generators, coroutines, tracebacks, line numbers."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import gradprune
from tests.loop.arms import ZERO, Training, assert_equal, batch_loss, compare, make_batches, train
from tests.step.arms import TinyModel


def as_generator(t: Training) -> Iterator[float]:
    try:
        for batch in t.batches:
            t.optimizer.zero_grad()
            loss = batch_loss(t.model, batch)
            loss.backward()
            t.optimizer.step()
            yield loss.item()
    finally:
        t.log.append("closed")


def test_generator() -> None:
    assert compare(as_generator, "dld").outcomes == "dld"


def test_generator_left_early() -> None:
    decorated = compare(as_generator, "dddl", take=2)
    assert decorated.outcomes == "dd" and decorated.log == ["closed"]


async def as_coroutine(t: Training) -> list[float]:
    losses = []
    async for batch in _queue(t):
        loss = batch_loss(t.model, batch)
        loss.backward()
        losses.append(loss.item())
        await _pause(t)
        t.optimizer.step()
    return losses


async def _queue(t: Training) -> AsyncIterator[Any]:
    for batch in t.batches:
        await _pause(t)
        yield batch


async def _pause(t: Training) -> None:
    t.log.append(torch.is_grad_enabled())


async def as_consumer(t: Training) -> None:
    source = _queue(t)
    for _ in range(len(t.batches)):
        batch = await anext(source)
        loss = batch_loss(t.model, batch)
        loss.backward()
        t.optimizer.step()


def test_coroutine() -> None:
    assert compare(as_coroutine, "ddl").outcomes == "ddl"


def test_coroutine_that_awaits_its_batch() -> None:
    assert compare(as_consumer, "ddl").outcomes == "ddl"


def with_jumps(t: Training) -> str:
    """Leaves iterations before and after the forward and the backward, in inner loops too."""
    for index, batch in enumerate(t.batches):
        if index == 1:
            continue
        for power in range(3):
            if power == 1:
                break
        loss = batch_loss(t.model, batch)
        if index == 2:
            continue
        loss.backward()
        t.optimizer.step()
        if index == 4:
            return f"left at {power}"
    else:
        return "went through"
    return "unreachable"


def test_jumps() -> None:
    decorated = compare(with_jumps, "dldlddd")
    assert decorated.result == "left at 1"
    # The third is left between its forward and its backward: it runs a second time, live.
    assert decorated.outcomes == "dllld"


def test_for_else() -> None:
    assert compare(with_jumps, "dld").result == "went through"


COUNT = 0


def with_scopes(t: Training) -> tuple[int, list[int]]:
    """Counts in a global, a closure and a cell that the loop's own inner functions share."""
    seen: list[int] = []
    steps = 0

    def tick() -> int:
        nonlocal steps
        steps += 1
        return steps

    for batch in t.batches:
        global COUNT
        COUNT += 1
        weights = [float(weight) for weight in batch["mask"].sum(0)]
        loss = batch_loss(t.model, batch) * (lambda factor: factor * 0.5)(1.0)
        COUNT += len(weights)
        loss.backward()
        seen.append(tick())
    return steps, seen


def test_scopes() -> None:
    global COUNT
    COUNT = 0
    assert compare(with_scopes, "dld").outcomes == "dld"
    assert COUNT == 2 * 3 * (1 + 4)


def test_closure_cells_are_shared() -> None:
    total = 0.0

    def loop(t: Training) -> None:
        nonlocal total
        for batch in t.batches:
            loss = batch_loss(t.model, batch)
            total += loss.item()
            loss.backward()

    decorated = train(loop, "dld", decorate=True)
    after_decorated, total = total, 0.0
    plain = train(loop, "dld", decorate=False)
    assert_equal(decorated, plain)
    assert after_decorated == total != 0.0


def test_exception_before_backward() -> None:
    def loop(t: Training) -> None:
        for index, batch in enumerate(t.batches):
            loss = batch_loss(t.model, batch)
            if index == 2:
                raise RuntimeError("in the third, before its backward")
            loss.backward()
            t.log.append(loss.item())

    decorated = compare(loop, "dldd")
    assert decorated.result == (RuntimeError, "in the third, before its backward")


def with_cleanup(t: Training) -> None:
    """An error in the middle of an iteration is handled inside it, and the loop goes on."""
    for index, batch in enumerate(t.batches):
        try:
            loss = batch_loss(t.model, batch)
            if index == 1:
                raise torch.OutOfMemoryError("pretended")
            loss.backward()
        except RuntimeError as error:
            t.log.append(str(error))
            t.optimizer.zero_grad()
        finally:
            t.log.append("cleaned")
        t.optimizer.step()


def test_cleanup() -> None:
    assert compare(with_cleanup, "dddl").outcomes.count("d") == 2


def test_bare_handler() -> None:
    def loop(t: Training) -> None:
        for batch in t.batches:
            try:
                batch_loss(t.model, batch).backward()
            except:
                t.log.append("failed")
                raise
            t.optimizer.step()

    assert compare(loop, "ddld").outcomes == "ddld"


def test_hooks_and_modes_are_gone_after_exception() -> None:
    def loop(t: Training) -> None:
        for batch in t.batches:
            loss = batch_loss(t.model, batch)
            t.log.append(t.model)
            raise KeyError(loss.item())
            loss.backward()

    apply = torch.autograd.Function.__dict__["apply"]
    arm = train(loop, "d", decorate=True)
    model = arm.log.pop()
    assert arm.result[0] is KeyError and torch.is_grad_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.autograd.Function.__dict__["apply"] is apply


class Base:
    def describe(self) -> str:
        return "base"


class Trainer(Base):
    def __init__(self, t: Training) -> None:
        self.__secret, self.t = "mangled", t

    @gradprune.grpo_loop(ZERO, strict=True)
    def fit(self, *, power: int = 1, **rest: str) -> list[str]:
        """Doc of fit."""
        said = []
        for batch in self.t.batches:
            loss = batch_loss(self.t.model, batch) * power
            loss.backward()
            said.append(f"{super().describe()} {self.__secret} {rest}")
        return said

    @staticmethod
    @gradprune.grpo_loop(ZERO, strict=True)
    def over(t: Training) -> None:
        for batch in t.batches:
            batch_loss(t.model, batch).backward()

    @gradprune.grpo_loop(ZERO, strict=True)
    @classmethod
    def named(cls, t: Training) -> str:
        for batch in t.batches:
            batch_loss(t.model, batch).backward()
        return cls.__name__


def make_training(pattern: str) -> Training:
    torch.manual_seed(0)
    model = TinyModel(width=4)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches(pattern), [])


def test_methods() -> None:
    trainer = Trainer(make_training("dl"))
    assert trainer.fit(key="word") == ["base mangled {'key': 'word'}"] * 2
    assert Trainer.fit.explain().dead == 1
    Trainer.over(make_training("d"))
    assert Trainer.named(make_training("d")) == "Trainer"


def test_function_keeps_its_face() -> None:
    def loop(t: Training, scale: float = 1.0, *, flag: bool = True) -> None:
        """Doc of loop."""
        for batch in t.batches:
            (batch_loss(t.model, batch) * scale).backward()

    loop.mark = "mine"  # type: ignore[attr-defined]
    decorated = gradprune.grpo_loop(ZERO, strict=True)(loop)
    assert inspect.signature(decorated) == inspect.signature(loop)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__defaults__", "mark"):
        assert getattr(decorated, name) == getattr(loop, name)
    assert decorated.__globals__ is loop.__globals__
    assert inspect.getsource(decorated) == inspect.getsource(loop)
    assert decorated.__code__.co_firstlineno == loop.__code__.co_firstlineno
    assert inspect.iscoroutinefunction(gradprune.grpo_loop(ZERO, strict=True)(as_coroutine))
    assert inspect.isgeneratorfunction(gradprune.grpo_loop(ZERO, strict=True)(as_generator))


def test_source_shows_what_runs() -> None:
    text = gradprune.grpo_loop(ZERO, strict=True)(as_generator).gradprune_source
    assert "with _gradprune.microbatch(_gradprune.locals()) as _microbatch:" in text
    assert "_microbatch.loss(loss).backward()" in text
    compile(text, "<rewritten>", "exec")


def test_names_do_not_collide() -> None:
    def loop(_gradprune: Training) -> None:
        _microbatch = "mine"
        for batch in _gradprune.batches:
            loss = batch_loss(_gradprune.model, batch)
            loss.backward()
            _gradprune.log.append(_microbatch)

    assert compare(loop, "dl").log == ["mine", "mine"]


def failing(t: Training) -> None:
    for batch in t.batches:
        loss = batch_loss(t.model, batch)
        if batch is t.batches[1]:
            raise ValueError("here")
        loss.backward()


def test_traceback_points_at_the_users_line() -> None:
    def frames(function: Any) -> list[tuple[str, int, str]]:
        try:
            function(make_training("dd"))
        except ValueError as error:
            summary = traceback.extract_tb(error.__traceback__)
            return [(frame.filename, frame.lineno or 0, frame.line or "") for frame in summary][1:]
        raise AssertionError("no error")

    decorated = frames(gradprune.grpo_loop(ZERO, strict=True)(failing))
    assert decorated == frames(failing)
    assert decorated[-1][2] == 'raise ValueError("here")'


def test_traced_lines_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger or a coverage tool sees the very lines of the original, and no other."""

    def lines(function: Any, t: Training) -> set[int]:
        seen: set[int] = set()

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                seen.add(frame.f_lineno)
            return local

        def tracer(frame: FrameType, event: str, arg: Any) -> Any:
            return local if frame.f_code.co_name == function.__code__.co_name else None

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            function(t)
        finally:
            sys.settrace(before)
        return seen

    decorated = gradprune.grpo_loop(ZERO, strict=True)(with_jumps)
    assert lines(decorated, make_training("dldld")) == lines(with_jumps, make_training("dldld"))


def test_global_helper_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    decorated = gradprune.grpo_loop(ZERO, strict=True)(failing)
    with pytest.raises(LookupError):
        monkeypatch.setitem(failing.__globals__, "batch_loss", lambda model, batch: {}["replaced"])
        decorated(make_training("l"))
