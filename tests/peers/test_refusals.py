"""A refusal names the line of the trainer's own file where the live term joins. ``-m slow`` runs them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers import expected, refusals, survey, wheels

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module", params=["sample", pytest.param("all", marks=pytest.mark.slow)])
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    try:
        wheels.roots()
    except wheels.NoRegistry as error:
        pytest.skip(f"no package registry, and the trainers' wheels are not in {wheels.cache_folder()}: {error}")
    names = expected.sample(refusals.LINES, 8) if request.param == "sample" else list(refusals.LINES)
    found = {row["name"]: row for row in survey.run([f"refusals:{name}" for name in names])}
    assert set(found) == set(names)
    return found


def test_there_are_enough() -> None:
    assert len(refusals.LINES) >= 20


def test_names_the_line(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        text, file = refusals.LINES[name]
        assert not row["truth"]["zero_microbatch"], name
        assert not row["verdict"]["proved"], name
        places = [reason["where"] for reason in row["verdict"]["reasons"] if reason["where"]]
        named = [(Path(place["file"]).name, place["text"]) for place in places]
        assert any(place == file and text in line for place, line in named), (name, named)
