"""gradprune for megatron-core: the only code here that imports it, and only when it is used.

`attach` makes the schedule that ``gradprune.compile(forward_step, zero=..., schedule=...)`` takes; `cpu` runs
megatron-core without a GPU, for development and tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradprune.megatron.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from gradprune.megatron import attachment

        return getattr(attachment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
