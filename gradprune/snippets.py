"""A loss from a file or from stdin, and example arguments for it, for the command line."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gradprune.errors import PruneError

ROWS, TOKENS = 6, 8


def load_function(place: str) -> Callable[..., Any]:
    """The function at ``file.py:name``; the only public one of ``file.py``; or that of a snippet on stdin (``-``)."""
    file, _, name = place.partition(":")
    path = _save_snippet(sys.stdin.read()) if file == "-" else Path(file)
    if not path.is_file():
        raise PruneError(f"{file} does not exist: pass file.py:function")
    module = _run(path)
    own = [
        value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    if name:
        function = getattr(module, name, None)
        if not callable(function):
            known = ", ".join(f.__name__ for f in own) or "no function"
            raise PruneError(f"{file} has no function {name!r}: it has {known}")
        return function
    if len(own) != 1:
        known = ", ".join(f.__name__ for f in own) or "no function"
        raise PruneError(f"{file} has {known}: name one of them, {file}:function")
    return own[0]


def _save_snippet(text: str) -> Path:
    """Source on disk, so that lines of it can be shown. A snippet may leave out ``import torch``."""
    folder = Path(tempfile.mkdtemp(prefix="gradprune-"))
    path = folder / "stdin.py"
    path.write_text(text, encoding="utf-8")
    return path


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PruneError(f"{path} is no Python file: pass file.py:function")
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(torch=torch, F=torch.nn.functional)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PruneError(f"{path} does not run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def example_of(function: Callable[..., Any], shapes: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name: `values` as they are, tensors of the stated or the default shape for the rest.

    Parameters with a default keep it unless they are named. Data is arbitrary: a proof does not look at it.
    """
    example: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters
    unknown = [name for name in (*shapes, *values) if name not in parameters]
    if unknown:
        raise PruneError(f"{function.__name__} has no parameter {unknown[0]!r}: it has {', '.join(parameters)}")
    for name, parameter in parameters.items():
        if name in values:
            example[name] = values[name]
        elif name in shapes or parameter.default is parameter.empty:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            example[name] = _tensor(name, shapes.get(name, f"{ROWS}x{TOKENS}"))
    return example


def _tensor(name: str, text: str) -> torch.Tensor:
    match = re.fullmatch(r"((?:\d+x)*\d+)?(?::(\w+))?", text)
    dtype = getattr(torch, (match and match[2]) or "float32", None)
    if match is None or not isinstance(dtype, torch.dtype):
        raise PruneError(f"--shape {name}={text}: write sizes and a dtype, {name}=8x128 or {name}=8x128:int64")
    return torch.ones([int(size) for size in match[1].split("x")] if match[1] else [], dtype=dtype)
