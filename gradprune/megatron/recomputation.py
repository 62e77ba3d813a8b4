"""Megatron's selective recomputation of layer norms and activation functions, which throws an output away in the
forward, and puts a hook on a later tensor that computes it again in the backward.

Tried with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput


def forgetting(hook: Any) -> Callable[[], None] | None:
    """See `gradprune.schedule.Schedule.recomputes`."""
    owner = getattr(hook, "__self__", None)
    if not isinstance(owner, CheckpointWithoutOutput):
        return None

    def forget() -> None:
        # As after a backward. The layer keeps its checkpoint until the next forward, and with it the graph.
        owner.ctx = owner.outputs = owner.run_function = owner.rng_states = None

    return forget
