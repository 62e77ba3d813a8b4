"""The demo, made small: it passes where the arms are equal, and fails by the tensor's name where they are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "megatron_grpo"
SMALL = f"""
import sys, warnings
sys.path.insert(0, {str(DEMO)!r})
warnings.simplefilter("ignore")
from gradprune.megatron import cpu
with cpu.emulate_cuda():
    import train
    train.UPDATES, train.GROUPS, train.WARM_UP, train.WARM_UP_ROWS, train.HIDDEN = 2, 4, 5, 8, 32
    {{change}}
    sys.exit(train.run())
"""
NUDGE = """
    from gradprune.runtime.attempts import PrunedRun
    finish = PrunedRun.finish
    def nudged(self, output):
        from megatron.core import parallel_state
        parameter = next(self._microbatch.models[""].parameters())
        parameter.main_grad.view(-1)[0] += 1e-3
        return finish(self, output)
    PrunedRun.finish = nudged
"""


def run_demo(folder: Path, change: str) -> subprocess.CompletedProcess[str]:
    code = SMALL.format(change=change.strip().replace("\n    ", "\n    "))
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=150)


@pytest.mark.timeout(200)
def test_demo_passes_and_leaves_its_record(tmp_path):
    done = run_demo(tmp_path, "pass")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-equal" in done.stdout and "proved: every gradient of forward_step is exactly zero" in done.stdout
    record = json.loads((tmp_path / "out" / "megatron_grpo.json").read_text())
    assert record["bit_equal"] and len(record["updates"]) == 2
    # A model that has learned next to nothing: whole groups are wrong, by their real rewards.
    assert sum(update["dead_microbatches"] for update in record["updates"]) > 0
    assert record["flops"]["dead_pruned"]["backward"] > 0
    assert (tmp_path / "out" / "megatron_grpo.png").stat().st_size > 1000


@pytest.mark.timeout(200)
def test_demo_fails_by_name_on_one_difference(tmp_path):
    done = run_demo(tmp_path, NUDGE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is not bit-equal" in done.stdout and "gradient norm" in done.stdout
    assert not (tmp_path / "out").exists()
