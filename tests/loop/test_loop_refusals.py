"""What grpo_loop does not understand it names, with its line, and leaves alone: the program runs as it did."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradprune
from gradprune.errors import NoEffectWarning, PlanError, PruneError, StalePlanError
from tests.loop.arms import ZERO, Training, batch_loss, compare, make_batches
from tests.step.arms import TinyModel


def marked_line(function: Callable[..., Any]) -> int:
    """The line of a function that ends in ``# here``."""
    lines, first = inspect.getsourcelines(function)
    return first + next(index for index, line in enumerate(lines) if line.rstrip().endswith("# here"))


def no_loop(t: Training) -> str:  # here
    return "ran"


def no_backward(t: Training) -> str:
    for batch in t.batches:  # here
        t.log.append(batch)
    return "ran"


def no_loop_around(t: Training) -> str:
    batch_loss(t.model, t.batches[0]).backward()  # here
    return "ran"


def nested(t: Training) -> str:
    def closure() -> None:
        batch_loss(t.model, t.batches[0]).backward()  # here

    for _ in range(2):
        closure()
    return "ran"


def comprehension(t: Training) -> str:
    for batch in t.batches:
        losses = [batch_loss(t.model, batch)]
        _ = [loss.backward() for loss in losses]  # here
    return "ran"


def two_loops(t: Training) -> str:
    for batch in t.batches:
        batch_loss(t.model, batch).backward()
    for batch in t.batches:  # here
        batch_loss(t.model, batch).backward()
    return "ran"


def two_backwards(t: Training) -> str:
    for batch in t.batches:
        batch_loss(t.model, batch).backward()
        (batch_loss(t.model, batch) * 2).backward()  # here
    return "ran"


def yields_between(t: Training) -> Iterator[Any]:
    for batch in t.batches:
        loss = batch_loss(t.model, batch)
        yield loss.item()  # here
        loss.backward()


async def awaits_between(t: Training) -> str:
    for batch in t.batches:
        loss = batch_loss(t.model, batch)
        await _nothing()  # here
        loss.backward()
    return "ran"


async def _nothing() -> None:
    pass


def changes_a_factor(t: Training) -> str:
    for batch in t.batches:
        loss = batch_loss(t.model, batch)
        if len(batch) > 100:
            batch = {}  # here
            loss.backward()
        else:
            loss.backward()
    return "ran"


def unknown_name(t: Training) -> str:
    for batch in t.batches:  # here
        batch_loss(t.model, batch).backward()
    return "ran"


CASES = {
    no_loop: "has no loop",
    no_backward: "no loop of no_backward calls backward",
    no_loop_around: "in no loop",
    nested: "in a nested function",
    comprehension: "a comprehension calls backward",
    two_loops: "2 loops that call backward, at lines",
    two_backwards: "and again: one loss a microbatch",
    yields_between: "yields or waits between 'loss' and the backward",
    awaits_between: "yields or waits between 'loss' and the backward",
    changes_a_factor: "changes what zero names",
}


def make_training(pattern: str = "d") -> Training:
    model = TinyModel(width=4)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches(pattern), [])


def refuse(function: Any, zero: Any = ZERO) -> tuple[Any, warnings.WarningMessage]:
    """Decorate, and expect one warning; the function that comes back must be the one that went in."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decorated = gradprune.grpo_loop(zero)(function)
    assert [warning.category for warning in caught] == [NoEffectWarning]
    assert decorated is function
    return decorated, caught[0]


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_refuses_by_name_and_line(function: Any) -> None:
    decorated, warning = refuse(function)
    message, line = str(warning.message), marked_line(function)
    assert CASES[function] in message and message.startswith(f"{function.__name__} runs as it is")
    assert f"{__file__}:{line}: " in message and (warning.filename, warning.lineno) == (__file__, line)
    assert decorated.gradprune_source is None
    assert CASES[function] in str(decorated.explain()) and decorated.report().total == 0
    with pytest.raises(PruneError, match=CASES[function][:12]):
        gradprune.grpo_loop(ZERO, strict=True)(function)


@pytest.mark.parametrize("function", [no_loop, two_loops, two_backwards, changes_a_factor])
def test_refused_program_runs(function: Any) -> None:
    assert refuse(function)[0](make_training("dl")) == "ran"


def test_refused_generator_runs() -> None:
    assert len(list(refuse(yields_between)[0](make_training("dl")))) == 2


def test_two_loops_told_apart_by_name() -> None:
    def loop(t: Training) -> None:
        for example in t.batches[:1]:
            batch_loss(t.model, example).backward()
        for batch in t.batches:
            batch_loss(t.model, batch).backward()

    assert compare(loop, "dl").outcomes == "dl"


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ("2 * 3", "names nothing in '2'"),
        ("batch['adv'] * 0.5", "names nothing in '0.5'"),
        ("batch['adv'] *", "is not an expression"),
        ("", "is not an expression"),
        ("batch['adv'] * batch['adv']", "twice"),
        ("nowhere['adv']", "names 'nowhere'"),
        (7, "zero is a int"),
    ],
)
def test_refuses_expression(zero: Any, message: str) -> None:
    decorated, warning = refuse(unknown_name, zero)
    line = marked_line(unknown_name) if message.startswith("names 'nowhere'") else marked_line(unknown_name) - 1
    assert message in str(warning.message) and (warning.filename, warning.lineno) == (__file__, line)
    assert decorated(make_training()) == "ran"


def test_refuses_lambda() -> None:
    function = lambda t: "ran"  # noqa: E731
    decorated, warning = refuse(function)
    assert "a lambda holds no loop" in str(warning.message) and warning.filename == __file__
    assert decorated(None) == "ran"


def test_refuses_function_without_source() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def made(t):\n    for x in t:\n        x.backward()\n    return 'ran'\n", "<made>", "exec"), scope)
    decorated, warning = refuse(scope["made"])
    assert "the source of made is not to be found" in str(warning.message) and "<made>:1" in str(warning.message)
    assert decorated([]) == "ran"


def test_refuses_what_is_no_function() -> None:
    decorated, warning = refuse(functools.partial(no_loop))
    assert "is a partial: decorate a function" in str(warning.message)
    assert decorated(None) == "ran"


def test_refuses_wrapped_function() -> None:
    @functools.wraps(unknown_name)
    def wrapper(t: Training) -> str:
        return unknown_name(t)

    decorated, warning = refuse(wrapper)
    assert "is wrapped by another decorator" in str(warning.message)
    assert decorated(make_training()) == "ran"


def test_refuses_decorator_without_arguments() -> None:
    with pytest.raises(PruneError, match=r"write @gradprune.grpo_loop\(zero="):
        gradprune.grpo_loop(no_loop)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"audit": 2.0}, {"on_violation": "shrug"}])
def test_refuses_options(options: dict[str, Any]) -> None:
    with pytest.raises(PruneError, match=next(iter(options))):
        gradprune.grpo_loop(ZERO, **options)


# What only a run can show --------------------------------------------------------------------------------------------


def plain_loop(t: Training) -> None:
    for batch in t.batches:
        loss = batch_loss(t.model, batch)
        loss.backward()  # here
        t.optimizer.step()
        t.log.append(loss.item())


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ("batch['advantage']", "zero: batch['advantage'] cannot be evaluated: KeyError: 'advantage'"),
        ("batch", "zero: batch is a dict: name tensors that the loss reads"),
    ],
)
def test_refuses_what_cannot_be_evaluated(zero: str, message: str) -> None:
    """It warns once, at the line of the backward, and runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decorated = compare(plain_loop, "dld", zero=zero, strict=False)
    assert [warning.category for warning in caught] == [NoEffectWarning]
    assert message in str(caught[0].message) and caught[0].lineno == marked_line(plain_loop)
    assert decorated.outcomes == "lll" and message in decorated.function.explain().decisions[0].outcome.reason
    strict = gradprune.grpo_loop(zero, strict=True)(plain_loop)
    with pytest.raises(PruneError, match="strict"):
        strict(make_training())


def test_refuses_a_factor_that_the_loss_does_not_read() -> None:
    """A slice made for the occasion is another tensor than the one that the loss reads."""
    with pytest.warns(NoEffectWarning, match=r"the loss never reads batch\['mask'\]\[:, :2\]"):
        assert compare(plain_loop, "dld", zero="batch['adv'] * batch['mask'][:, :2]", strict=False).outcomes == "lll"


def test_refuses_where_no_model_is_in_reach() -> None:
    hidden = []

    class Holder:
        __slots__ = ("model",)

        def loss(self, batch: Any) -> torch.Tensor:
            return batch_loss(self.model, batch)

    def loop(t: Training) -> None:
        holder = Holder()
        holder.model = t.model
        hidden.append(holder)
        for batch in t.batches:
            loss = holder.loss(batch)
            loss.backward()

    with pytest.warns(NoEffectWarning, match="no module with trainable parameters is in reach"):
        assert compare(loop, "dl", strict=False).outcomes == "ll"


def test_keeps_advantages_that_are_not_finite() -> None:
    def loop(t: Training) -> None:
        for batch in t.batches:
            if batch is t.batches[1]:
                batch["adv"][0] = float("nan")
            loss = batch_loss(t.model, batch)
            loss.backward()

    decorated = compare(loop, "ddd")
    assert decorated.outcomes == "dld"
    assert "nan" in decorated.function.explain().decisions[1].outcome.reason.lower()


def test_raises_where_a_plan_is_stale() -> None:
    def loop(t: Training, batches: Any) -> None:
        for batch in batches:
            loss = batch_loss(t.model, batch)
            loss.backward()

    t = make_training("dl")
    plan = gradprune.StepPlan.from_rollout(torch.zeros(6), None, 3)
    with pytest.raises(StalePlanError, match="microbatch 1 is planned dead"):
        gradprune.grpo_loop(ZERO)(loop)(t, plan.bind(t.batches))
    assert issubclass(StalePlanError, PlanError)
