"""Real processes that talk over gloo, and what each of them has to say."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """``work(rank, world, *args)`` in `world` processes; what each returned, in order of rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (world, work, args, folder), nprocs=world)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _run(rank: int, world: int, work: Callable[..., Any], args: Any, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=90))
    try:
        torch.save(work(rank, world, *args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def issued() -> int:
    """How many collectives this rank has issued so far, those of C++ reducers included."""
    return dist.group.WORLD._get_sequence_number_for_group()
