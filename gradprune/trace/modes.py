"""Function modes, taken off the stack for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode


@contextmanager
def suspended(mode: TorchFunctionMode) -> Iterator[bool]:
    """Takes `mode` off where it is the innermost one: torch calls inside cost nothing then. Yields whether it was."""
    innermost = _get_current_function_mode() is mode
    if innermost:
        _pop_mode()
    try:
        yield innermost
    finally:
        if innermost:
            _push_mode(mode)
