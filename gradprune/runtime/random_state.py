"""The state of the random number generators that a step may draw from: taken, put back, or lent for a while."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


class RandomState:
    """The state, at this moment, of Python's, NumPy's and torch's generators, on the CPU and on CUDA `devices`."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._python, self._numpy, self._cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, numbers are drawn from this state on; afterwards the generators go on from where they were."""
        now = RandomState(self._cuda)
        self.restore()
        try:
            yield
        finally:
            now.restore()
