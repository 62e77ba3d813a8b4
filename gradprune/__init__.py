"""gradprune: prove that the gradient of a microbatch is exactly zero, and do not compute it.

Six public names. They load on first use, so that ``import gradprune`` imports neither torch nor megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradprune.errors import PruneError
    from gradprune.flops import FlopReport
    from gradprune.loop import grpo_loop
    from gradprune.planner import StepPlan
    from gradprune.proof import prove
    from gradprune.step import compile

__version__ = "0.1.0"

__all__ = ["FlopReport", "PruneError", "StepPlan", "compile", "grpo_loop", "prove"]

_HOMES = {
    "FlopReport": "flops",
    "PruneError": "errors",
    "StepPlan": "planner",
    "compile": "step",
    "grpo_loop": "loop",
    "prove": "proof",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"gradprune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gradprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
