"""The benchmarks run on CPUs too, with tiny models: the scripts that GPUs are given work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "processes, layout",
    [
        (2, ()),
        (2, ("--tensor", "2")),
        (2, ("--pipeline", "2")),
        (2, ("--distributed-optimizer",)),
        (8, ("--tensor", "2", "--distributed-optimizer")),
        (8, ("--tensor", "2", "--pipeline", "2", "--distributed-optimizer")),
    ],
)
def test_ranks_on_cpus(tmp_path, processes, layout):
    pytest.importorskip("megatron.core")
    out = tmp_path / "ranks.json"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "benchmarks/gpu/ranks.py", "--tiny"]
    more = ["--sequences", str(8 * processes), "--repeats", "1", "--out", str(out), *layout]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command, *more], cwd=ROOT, env=environment, check=True, timeout=280)
    result = json.loads(out.read_text())
    assert result["bit_equal"] and result["dead_microbatches_of_this_rank"] > 0
    assert ("bubble" in result) == ("--pipeline" in layout)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model, package", [("megatron", "megatron.core"), ("hugging_face", "transformers")])
@pytest.mark.parametrize("more", [(), ("--recompute",)])
def test_saving_on_cpus(tmp_path, model, package, more):
    pytest.importorskip(package)
    result = of_script(tmp_path, "saving.py", "--model", model, "--dtype", "float32", "--tokens", "64", *more)
    assert [row["dead_share"] for row in result["rows"]] == [0, 0.3, 0.6, 0.9, 1]
    tried = 10 + result["repeats"] * (3 + 6 + 9 + 10) - result["dead_microbatches"]
    assert 0 <= tried <= (1 if more else 0)
    assert all(row["limit"] < row["dead_share"] or not row["dead_share"] for row in result["rows"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_exactness_on_cpus(tmp_path):
    pytest.importorskip("transformers")
    result = of_script(tmp_path, "exactness.py", "--only", "hugging_face", "--tokens", "64")
    assert len(result["cases"]) == 6 and not any(case["different"] for case in result["cases"])
    assert all(case["dead"] >= 4 for case in result["cases"])


def of_script(folder, script, *arguments):
    """What a benchmark writes when it is run with a tiny model."""
    out = folder / "result.json"
    command = [sys.executable, f"benchmarks/gpu/{script}", "--tiny", "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GRADPRUNE_CACHE": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=280)
    return json.loads(out.read_text())


def test_pipeline_takes_what_arithmetic_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    from pipelines import makespan

    halves = [0.5, 0.5]
    assert makespan(halves, [1.0] * 4, [2.0] * 4) == (4 + 1) * (0.5 + 1.0)
    assert makespan(halves, [1.0] * 4, [0.0] * 4) == (4 + 1) * 0.5
    assert makespan([1.0], [1.0] * 4, [2.0, 0.0, 2.0, 0.0]) == 4 + 4
    assert makespan(halves, [1.0] * 4, [2.0, 0.0, 2.0, 0.0]) < makespan(halves, [1.0] * 4, [2.0] * 4)
