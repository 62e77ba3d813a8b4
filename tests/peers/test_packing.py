"""A loss of a released trainer whose rows are coupled is never re-packed where the probe is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gradprune.errors import PlanError
from gradprune.planner import StepPlan
from tests.peers import expected, wheels
from tests.peers.loaders import TRAINERS

pytestmark = pytest.mark.peers
TRUTH = {name: line["truth"] for name, line in expected.load().items() if not expected.is_variant(name)}


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def answers(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    try:
        wheels.roots()
    except wheels.NoRegistry as error:
        pytest.skip(f"no package registry, and the trainers' wheels are not in {wheels.cache_folder()}: {error}")
    trainers = ["trl", "verl", "areal"] if request.param == "some" else list(TRAINERS)
    environment = {**os.environ, "PYTHONPATH": str(wheels.REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.peers.packing", *trainers]
    done = subprocess.run(command, cwd=wheels.REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["name"] for row in rows} == {name for name in TRUTH if name.split("/")[0] in trainers}
    return {row["name"]: row["answers"] for row in rows}


def test_no_coupled_loss_is_called_global(answers: dict[str, list[str]]) -> None:
    coupled = {name: found for name, found in answers.items() if "rows_coupled" in TRUTH[name]}
    assert coupled
    assert [name for name, found in coupled.items() if "global" in found] == []
    for answer in {answer for found in coupled.values() for answer in found}:
        with pytest.raises(PlanError, match=r"couples rows|divides by a number of its microbatch"):
            StepPlan.build([8, 8], [1.0, 0.0], token_budget=16, ranks=1, normaliser=answer)  # type: ignore[arg-type]


def test_one_answer_whatever_the_batch(answers: dict[str, list[str]]) -> None:
    assert {name: found for name, found in answers.items() if len(set(found)) != 1} == {}
    assert {"global", "microbatch", "coupled"} == {found[0] for found in answers.values()}
