"""A refusal names the line of the trainer's own file where the live term joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers import refusals, survey, wheels

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    try:
        wheels.roots()
    except wheels.NoRegistry as error:
        pytest.skip(f"no package registry, and the trainers' wheels are not in {wheels.cache_folder()}: {error}")
    return {row["name"]: row for row in survey.run([["refusals"]])}


def test_there_are_enough() -> None:
    assert len(refusals.LINES) >= 20


@pytest.mark.parametrize("name", refusals.LINES)
def test_names_the_line(rows: dict[str, Any], name: str) -> None:
    text, file = refusals.LINES[name]
    row = rows[name]
    assert not row["truth"]["zero_microbatch"]
    assert not row["verdict"]["proved"]
    places = [reason["where"] for reason in row["verdict"]["reasons"] if reason["where"]]
    named = [(Path(place["file"]).name, place["text"]) for place in places]
    assert any(place == file and text in line for place, line in named), named
