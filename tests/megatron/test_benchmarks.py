"""The benchmark of several ranks runs on CPUs too, with a tiny model: the script that GPUs are given works."""

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
@pytest.mark.parametrize("layout", [(), ("--tensor", "2"), ("--pipeline", "2"), ("--distributed-optimizer",)])
def test_ranks_on_cpus(tmp_path, layout):
    pytest.importorskip("megatron.core")
    out = tmp_path / "ranks.json"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmarks/gpu/ranks.py", "--tiny"]
    more = ["--sequences", "16", "--repeats", "1", "--out", str(out), *layout]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command, *more], cwd=ROOT, env=environment, check=True, timeout=280)
    result = json.loads(out.read_text())
    assert result["bit_equal"] and result["dead_microbatches_of_this_rank"] > 0
    assert ("bubble" in result) == ("--pipeline" in layout)


def test_pipeline_takes_what_arithmetic_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    from pipelines import makespan

    halves = [0.5, 0.5]
    assert makespan(halves, [1.0] * 4, [2.0] * 4) == (4 + 1) * (0.5 + 1.0)
    assert makespan(halves, [1.0] * 4, [0.0] * 4) == (4 + 1) * 0.5
    assert makespan([1.0], [1.0] * 4, [2.0, 0.0, 2.0, 0.0]) == 4 + 4
    assert makespan(halves, [1.0] * 4, [2.0, 0.0, 2.0, 0.0]) < makespan(halves, [1.0] * 4, [2.0] * 4)
