"""Which line of the user's code is running: the innermost frame that is neither torch's, nor Python's, nor ours."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import FrameType

import torch

from gradprune.facts import SourceLine

_FOREIGN = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.abspath(__file__)),
        os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "passes"),
    )
)
_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")


def is_user_file(path: str) -> bool:
    """Whether a file holds code of the user or of a library the user called, not torch, gradprune or the stdlib."""
    if path.startswith(_FOREIGN) or path.startswith("<frozen"):
        return False
    return not path.startswith(_STDLIB) or "site-packages" in path


def user_line(frame: FrameType | None = None) -> SourceLine | None:
    """The innermost user line at or above `frame` (default: the caller); None if there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return source_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def source_line(file: str, line: int, function: str = "") -> SourceLine:
    """A SourceLine with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip(), function)
