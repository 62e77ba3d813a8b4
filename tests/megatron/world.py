"""Worlds of real processes, over gloo or one GPU each, that stay up between tests: starting one is dearer than a case.

`World.run` calls a function on every rank and gives back what each returned. A rank that raises or hangs fails the
test with its traceback, within the time limit, and the next test gets a fresh world.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_TIMEOUT = float(os.environ.get("GRADPRUNE_TEST_TIMEOUT", "20"))
"""Seconds that a collective waits for the other ranks; more of them on a busy machine."""
CLEAN = {"PlanError", "StalePlanError", "PruneError"}
"""Raised on every rank, these leave no collective behind: the world can go on."""
LIFE = 40
"""Calls that a world serves before it is started anew: a few threads of gloo outlive every call."""
START_LIMIT = 120.0
"""Seconds for all processes to be there; imports on a busy machine."""


class RankError(AssertionError):
    """What the ranks raised; `kinds` are the names of the exceptions, by rank."""

    def __init__(self, failures: dict[int, tuple[str, str]]) -> None:
        self.kinds = {rank: kind for rank, (kind, _) in failures.items()}
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, (_, text) in sorted(failures.items())))


class World:
    """`size` processes in one group, each with megatron-core: on the CPU over gloo, or each on a GPU over NCCL."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        self._device = device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._served = 0

    def run(self, function: Callable[..., Any], *args: Any, limit: float = 60.0, grace: float = 3.0) -> list[Any]:
        """``function(*args)`` on every rank; results by rank.

        Raises RankError if any raised, or ran past `limit` seconds; the others then have `grace` seconds to follow.
        """
        if self._served == LIFE:
            self.close()
        if not self._processes:
            self._start()
        self._served += 1
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        results, failures = self._collect(time.monotonic() + limit, grace)
        if failures:
            if len(failures) < self.size or not {kind for kind, _ in failures.values()} <= CLEAN:
                self.close()
            raise RankError(failures)
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._served = [], [], 0

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115  the processes delete it
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self._device, store.name, there), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(here)
        _, failures = self._collect(time.monotonic() + START_LIMIT, 0.0)
        if failures:
            self.close()
            raise RankError(failures)

    def _collect(self, deadline: float, grace: float) -> tuple[dict[int, Any], dict[int, tuple[str, str]]]:
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        waiting = dict(zip(self._pipes, range(self.size)))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)  # it prints where it hangs
                time.sleep(0.5)
                failures |= dict.fromkeys(waiting.values(), ("Timeout", "did not finish in time"))
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    kind, value = "Died", "the process ended"
                if kind == "ok":
                    results[rank] = value
                else:
                    failures[rank] = (kind, value)
                    deadline = min(deadline, time.monotonic() + grace)
        return results, failures


def _serve(rank: int, size: int, device: str, path: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    store = dist.FileStore(path, size)
    with _on(device, rank):
        importlib.import_module("tests.megatron.arms")
        pipe.send(("ok", None))
        for call in itertools.count():
            module, name, args = pipe.recv()
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=dist.PrefixStore(f"call {call}", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
            )
            try:
                answer = ("ok", getattr(importlib.import_module(module), name)(*args))
            except BaseException as error:  # noqa: BLE001  the parent decides
                answer = (type(error).__name__, traceback.format_exc())
            # Megatron never destroys its groups, and each of them holds threads.
            dist.destroy_process_group()
            gc.collect()
            pipe.send(answer)


@contextmanager
def _on(device: str, rank: int) -> Iterator[None]:
    """Megatron on the CPU, or deterministic on GPU number `rank`."""
    if device == "cpu":
        from gradprune.megatron import cpu

        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with cpu.emulate_cuda():
            yield
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    yield
