"""What megatron-core does to tensors that a trace cannot follow or would leave behind, undone while a model is traced.

Tried with megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gradprune.patching import replaced


@contextmanager
def traceable() -> Iterator[None]:
    """While open, megatron-core keeps no buffer between calls, and makes viewless tensors by copying.

    Its global buffer would hand tensors of a trace to the next real forward; its viewless tensors are made by
    assigning ``.data``, which no operator shows. Neither changes what is computed.
    """
    from megatron.core import parallel_state, utils

    with ExitStack() as undo:
        undo.enter_context(replaced(utils, "_kernel_make_viewless_tensor", _copied))
        if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
            undo.enter_context(replaced(parallel_state, "_GLOBAL_MEMORY_BUFFER", _NoBuffer()))
        yield


def _copied(inp: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return inp.clone()


class _NoBuffer:
    """A GlobalMemoryBuffer that allocates every time."""

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[..., Any] | None = None,
    ) -> torch.Tensor:
        return torch.empty(tuple(tensor_shape), dtype=dtype, device=torch.cuda.current_device())
