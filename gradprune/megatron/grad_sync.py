"""Gradient reduction that megatron's DDP overlaps with the backward of the last microbatch, when that one is dead.

With ``overlap_grad_reduce`` the hooks of the last microbatch launch the reduction of each bucket group as its gradients
come in. No backward, no hooks: DDP would fail an assertion, and the other ranks would wait. So the order in which one
whole live step launches the groups is written down, and where a later step's backward did not launch a group, it is
launched before DDP waits for it, in that order: the one in which all other ranks launch theirs.

Tried with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gradprune.patching import replaced


class GradSync:
    """Watches the bucket groups of DDP `chunks`, and launches what no backward launched."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks: list[Any] = [chunk for chunk in chunks if _overlaps(chunk)]
        self._groups: list[Any] = [
            group for chunk in self._chunks for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        ]
        self._order: list[int] | None = None
        self._seen: dict[int, None] = {}  # groups, by when the last of their gradients came in
        self._launched: set[int] = set()

    @property
    def knows_order(self) -> bool:
        """Whether a whole live step was seen, or none is needed."""
        return not self._groups or self._order is not None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The wrappers are on the user's bucket groups and chunks while this is open."""
        with ExitStack() as stack:
            for index, group in enumerate(self._groups):
                for name, wrap in (
                    ("register_grad_ready", self._ready),
                    ("start_grad_sync", self._started),
                    ("reset", self._reset),
                ):
                    stack.enter_context(replaced(group, name, wrap(index, getattr(group, name))))
            for chunk in self._chunks:
                stack.enter_context(replaced(chunk, "finish_grad_sync", self._finishing(chunk.finish_grad_sync)))
            yield

    def _ready(self, index: int, register: Callable[..., None]) -> Callable[..., None]:
        group = self._groups[index]

        def register_grad_ready(*args: Any, **kwargs: Any) -> None:
            if self._order is None and group.is_last_microbatch:
                self._seen.pop(index, None)
                self._seen[index] = None
            register(*args, **kwargs)

        return register_grad_ready

    def _started(self, index: int, start: Callable[..., None]) -> Callable[..., None]:
        def start_grad_sync(*args: Any, **kwargs: Any) -> None:
            self._launched.add(index)
            start(*args, **kwargs)

        return start_grad_sync

    def _reset(self, index: int, forget: Callable[[], None]) -> Callable[[], None]:
        def reset() -> None:
            self._launched.discard(index)
            self._seen.pop(index, None)
            forget()

        return reset

    def _finishing(self, finish: Callable[..., None]) -> Callable[..., None]:
        def finish_grad_sync(force_all_reduce: bool = False) -> None:
            if self._order is None:
                self._learn()
            else:
                self._launch_missing(self._order, force_all_reduce)
            finish(force_all_reduce=force_all_reduce)

        return finish_grad_sync

    def _learn(self) -> None:
        # A group in neither set got no gradient at all: then DDP itself is about to complain.
        if len(self._seen.keys() | self._launched) == len(self._groups):
            self._order = list(self._seen)

    def _launch_missing(self, order: list[int], force_all_reduce: bool) -> None:
        for index in order:
            group = self._groups[index]
            # In its first batch a group is launched by finish_grad_sync itself, on every rank.
            if index not in self._launched and not group.is_first_batch:
                group.start_grad_sync(force_all_reduce=force_all_reduce)


def _overlaps(chunk: Any) -> bool:
    return hasattr(chunk, "bucket_groups") and chunk.ddp_config.overlap_grad_reduce
