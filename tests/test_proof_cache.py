"""Verdicts on disk: found again by content, never for another program, and no file of another kind is believed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import gradprune
from gradprune.errors import NoEffectWarning, PruneError, TraceError
from gradprune.runtime import proof_cache
from gradprune.size_expressions import evaluate_text, symbols_in
from tests.step.arms import TinyModel, make_batch
from tests.step.losses import Loss, dapo, grpo


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADPRUNE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def traced(monkeypatch):
    """Counts the proofs that were really made."""
    made = []
    original = proof_cache.prove_program

    def counting(program, hypothesis):
        made.append(program.subject)
        return original(program, hypothesis)

    monkeypatch.setattr(proof_cache, "prove_program", counting)
    return made


def run_once(policy=grpo, zero="adv * mask", rows=4, dtype=torch.float32):
    step = gradprune.compile(Loss(policy), zero=zero)
    step(TinyModel().to(dtype), make_batch(rows, 6, dead=True, seed=0))
    return step.explain()


def test_second_process_finds_the_verdict(folder, traced):
    first, second = run_once(), run_once(rows=5)
    assert len(traced) == 1
    assert len(list(folder.iterdir())) == 1
    assert first.verdicts == second.verdicts
    assert second.dead == 1


def test_what_could_not_be_traced_is_tried_again(folder, traced, monkeypatch):
    def unable(*args, **kwargs):
        raise TraceError("out of luck")

    with monkeypatch.context() as patch, pytest.warns(NoEffectWarning, match="out of luck"):
        patch.setattr("gradprune.proof.trace_joint", unable)
        assert run_once().dead == 0
    assert list(folder.iterdir()) == []
    assert run_once().dead == 1 and len(traced) == 2


@pytest.mark.parametrize(
    "change", [{"policy": dapo}, {"zero": "mask * adv"}, {"rows": 2, "dtype": torch.bfloat16}], ids=str
)
def test_another_program_is_proved_anew(folder, traced, change):
    run_once()
    run_once(**change)
    assert len(traced) == 2


def test_another_analysis_proves_anew(folder, traced, monkeypatch):
    run_once()
    monkeypatch.setattr(proof_cache, "_own_code", lambda: "a rule was changed")
    run_once()
    assert len(traced) == 2


def test_refusal_is_kept_too(folder, traced):
    with pytest.warns(NoEffectWarning):
        for _ in range(2):
            assert run_once(lambda logp, batch, select: select(logp * (batch["adv"][:, None] + 1), batch)).dead == 0
    assert len(traced) == 1


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"verdict": {"proved": true}, "rules": []}'])
def test_file_of_another_kind_is_passed_over(folder, traced, content):
    run_once()
    (file,) = folder.iterdir()
    file.write_text(content)
    run_once()
    assert len(traced) == 2
    assert json.loads(file.read_text())["verdict"]["proved"]


def test_switched_off_by_an_empty_variable(tmp_path, monkeypatch, traced):
    monkeypatch.setenv("GRADPRUNE_CACHE", "")
    run_once()
    run_once()
    assert len(traced) == 2


def test_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, traced):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("GRADPRUNE_CACHE", str(blocked))
    assert run_once().dead == 1


def test_same_key_in_another_process(folder):
    code = "from tests.test_proof_cache import run_once; run_once()"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert len(list(folder.iterdir())) == 1


def test_expressions_over_sizes():
    assert evaluate_text("Eq(s0, 2*s1) & (s1 >= 2)", {"s0": 6, "s1": 3})
    assert not evaluate_text("Ne(Mod(s0, 4), 0)", {"s0": 8})
    assert symbols_in("Eq(FloorDiv(s0, 2), s1)") == {"s0", "s1"}


@pytest.mark.parametrize(
    "text", ["__import__('os')", "().__class__", "[x for x in y]", "s0 if s1 else 2", "'text'", "s0 +"]
)
def test_only_expressions_over_sizes_are_evaluated(text):
    with pytest.raises(PruneError, match="is no expression over sizes"):
        evaluate_text(text, {"s0": 1, "s1": 1, "y": 1})
