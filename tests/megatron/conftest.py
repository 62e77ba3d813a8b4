"""One world of processes a size for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.megatron.world import World


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """``worlds(size)``: the processes of that size; they are started at the first use."""
    running: dict[int, World] = {}

    def of_size(size: int) -> World:
        return running.setdefault(size, World(size))

    yield of_size
    for world in running.values():
        world.close()
