"""The examples train the same policy, bit for bit: decorated, compiled, and in plain PyTorch."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import gradprune

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_examples_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    decorated = load("decorated_loop", monkeypatch)
    history, policy = decorated["main"]()
    report = decorated["train"].report()
    assert report.microbatches_dead > report.microbatches_live > 0
    assert report.pruned.total / report.total > 0.5
    assert history[-1] > 0.9 > 0.2 > history[0]

    with monkeypatch.context() as plain:
        plain.setattr(gradprune, "grpo_loop", lambda zero: lambda function: function)
        undecorated = load("decorated_loop", monkeypatch)
        assert not hasattr(undecorated["train"], "report")
        others = [undecorated["main"]()]
    compiled = load("plain_loop", monkeypatch)
    for prune in (True, False):
        *result, account = compiled["main"](prune)
        others.append(tuple(result))
        assert account == (report if prune else gradprune.FlopReport())
    for other_history, other in others:
        assert other_history == history
        for one, two in zip(policy.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two) and torch.equal(one.grad, two.grad)
