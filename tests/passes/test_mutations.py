"""A mutation check: with any one guard dropped, the tests of the rules fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.passes.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}:{m.before[:40]}")
def test_changes_text_that_is_there_once(mutation: Mutation) -> None:
    text = (ROOT / "passes" / mutation.file).read_text()
    assert text.count(mutation.before) == 1
    assert mutation.before != mutation.after


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}:{m.before[:40]}")
def test_tests_notice(mutation: Mutation, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "gradprune", tmp_path / "gradprune", ignore=shutil.ignore_patterns("passes", "__pycache__"))
    shutil.copytree(ROOT / "passes", tmp_path / "gradprune" / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "gradprune" / "passes" / mutation.file
    changed.write_text(changed.read_text().replace(mutation.before, mutation.after))
    command = [sys.executable, "-m", "tests.passes.judge_rules"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, f"survived: {mutation.before!r} -> {mutation.after!r}\n{done.stdout[-2000:]}"
    assert str(changed.parent.parent if "rules" in mutation.file else changed.parent) in done.stdout
