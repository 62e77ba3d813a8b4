"""Losses that take one advantage a row, given just that: the product with the mask is then enough for them too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers import survey, wheels

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    try:
        wheels.roots()
    except wheels.NoRegistry as error:
        pytest.skip(f"no package registry, and the trainers' wheels are not in {wheels.cache_folder()}: {error}")
    return survey.run(["by_row"], processes=1)


def test_proves_every_loss_without_divergence(rows: list[dict[str, Any]]) -> None:
    live = {row["name"] for row in rows if not row["zero"]}
    refused = {row["name"] for row in rows if not row["verdict"]["proved"]}
    assert len(rows) == 23
    assert refused == live == {"trl/grpo+kl"}
