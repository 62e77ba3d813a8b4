"""A dead run that turns out to be another program goes on as a live one: the user's code runs once."""

from __future__ import annotations

import os
import weakref
from typing import Any

import pytest
import torch

from tests.loop.arms import Training, assert_equal, batch_loss, compare, policy_loss, token_logps, train


def hidden_coefficient(index: int) -> float:
    """Where no fingerprint of Python state looks."""
    return float(os.environ["KL_OF_A_TEST"]) if index == 3 else 0.0


def with_hidden_change(t: Training) -> float:
    """The penalty comes and goes; running values are rebound before the backward."""
    total, count = 0.0, 0
    weights: Any = None
    for index, batch in enumerate(t.batches):
        count = count + 1
        logp = token_logps(t.model, batch["ids"])
        loss = batch_loss(t.model, batch)
        coefficient = hidden_coefficient(index)
        if coefficient:
            loss = loss + coefficient * (logp * batch["mask"]).mean()
        weights = logp.detach().mean() if weights is None else 0.9 * weights + 0.1 * logp.detach().mean()
        total += loss.item()
        loss.backward()
        t.optimizer.step()
        t.log.append((count, total, weights))
    return total


def test_goes_on_live_where_the_program_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KL_OF_A_TEST", "0.1")
    decorated = compare(with_hidden_change, "ddddd")
    assert decorated.outcomes == "dddld"
    assert "something else than what was proved" in decorated.function.explain().decisions[3].outcome.reason


def test_keeps_the_program_that_did_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KL_OF_A_TEST", "0.0")
    assert compare(with_hidden_change, "ddddd").outcomes == "ddddd"


def test_side_effects_happen_once(monkeypatch: pytest.MonkeyPatch) -> None:

    def loop(t: Training) -> None:
        for index, batch in enumerate(t.batches):
            loss = batch_loss(t.model, batch)
            if hidden_coefficient(index):
                loss = loss * 2
            t.log.append(index)
            loss.backward()
            t.optimizer.step()

    monkeypatch.setenv("KL_OF_A_TEST", "0.1")
    decorated = compare(loop, "dddd")
    assert decorated.outcomes == "dddl" and decorated.log == [0, 1, 2, 3]


def test_goes_on_live_where_the_region_is_left() -> None:
    """Losses that are kept, and summed up after the loop, have their gradient."""

    def loop(t: Training) -> None:
        held = []
        for index, batch in enumerate(t.batches):
            loss = batch_loss(t.model, batch)
            if index >= 2:
                held += [loss]
                continue
            loss.backward()
        (sum(held) + 0.0).backward()
        t.optimizer.step()

    assert compare(loop, "dddl").outcomes == "ddll"


def test_goes_on_live_with_a_backward_inside() -> None:
    """A helper trains a critic inside the region, now and then: its step must happen, once, and with its gradient."""

    def loop(t: Training) -> None:
        critic = torch.nn.Linear(4, 1)
        adam = torch.optim.Adam(critic.parameters(), lr=0.1)

        def update_critic(batch: dict[str, torch.Tensor]) -> None:
            value = critic(batch["mask"]).mean()
            adam.zero_grad()
            value.backward()
            adam.step()
            t.log.append(critic.weight.detach().clone())

        for index, batch in enumerate(t.batches):
            value = critic(batch["mask"]).mean().detach()
            if index % 2 == 1:
                update_critic(batch)
            loss = batch_loss(t.model, batch) + 0 * value
            loss.backward()
        t.optimizer.step()

    decorated = compare(loop, "dddd", strict=False)
    assert decorated.outcomes == "dldl"
    assert "a backward runs inside the microbatch" in decorated.function.explain().decisions[1].outcome.reason


def test_keeps_a_loss_without_gradient() -> None:
    def loop(t: Training) -> None:
        for index, batch in enumerate(t.batches):
            loss = batch_loss(t.model, batch)
            if index == 1:
                loss = loss.detach()
            loss.backward()

    decorated = train(loop, "dd", decorate=True)
    assert decorated.result[0] is RuntimeError and "does not require grad" in decorated.result[1]
    assert_equal(decorated, train(loop, "dd", decorate=False))


def test_keeps_a_backward_inside_a_mode() -> None:
    """A mode entered after the forward stands over ours: the microbatch runs on, live."""

    def loop(t: Training) -> None:
        for batch in t.batches:
            loss = batch_loss(t.model, batch)
            with torch.device("cpu"):
                loss.backward()
                t.log.append(torch.ones(1))
            t.optimizer.step()

    assert compare(loop, "dld").outcomes == "lll"


def test_keeps_gradients_off() -> None:
    def loop(t: Training) -> None:
        with torch.no_grad():
            for batch in t.batches:
                loss = batch_loss(t.model, batch)
                t.log.append(loss.item())
                if loss.requires_grad:
                    loss.backward()

    assert compare(loop, "dld").outcomes == "lll"


def test_keeps_no_tensor_of_the_last_iteration() -> None:
    """Logits of one iteration are gone when those of the next one are there, as they are without the decorator."""

    def loop(t: Training) -> None:
        references: list[weakref.ref[torch.Tensor]] = []
        for batch in t.batches:
            logits = t.model(batch["ids"])
            t.log.append([reference() is None for reference in references])
            logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch["ids"][:, 1:, None]).squeeze(-1)
            loss = policy_loss(logp, batch["old"], batch["adv"], batch["mask"])
            loss.backward()
            references.append(weakref.ref(logits))
            del loss, logp

    decorated = compare(loop, "ddld")
    assert decorated.outcomes == "ddld" and decorated.log[-1] == [True, True, True]


def test_keeps_no_tensor_of_an_iteration_that_was_left() -> None:
    def loop(t: Training) -> None:
        references: list[weakref.ref[torch.Tensor]] = []
        for index, batch in enumerate(t.batches):
            logits = t.model(batch["ids"])
            t.log.append([reference() is None for reference in references])
            references.append(weakref.ref(logits))
            if index < 2:
                continue
            policy_loss(logits.mean(-1)[:, :-1], batch["old"], batch["adv"], batch["mask"]).backward()

    decorated = compare(loop, "dddd")
    assert decorated.outcomes == "lldd" and decorated.log[-1] == [True, True, True]
