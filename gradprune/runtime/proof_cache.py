"""Verdicts on disk, by content: the same program under the same torch is proved once, by whichever process comes first.

One JSON file a program, written whole or not at all, so that concurrent ranks may share the folder. The folder is
``$GRADPRUNE_CACHE``, or ``gradprune`` in the user's cache folder; an empty ``GRADPRUNE_CACHE`` switches it off.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import gradprune
from gradprune.facts import Hypothesis, Refusal, Verdict, verdict_from_json
from gradprune.proof import program_of, prove_program
from gradprune.runtime.tape import Tape
from gradprune.trace.admission import Admission, SizeRules

FORMAT = 1

# The folders of this package whose code decides on a verdict.
_CODE = (".", "runtime", "trace", "passes", "passes/rules")


def folder() -> Path | None:
    """Where verdicts are kept; None where that is switched off."""
    chosen = os.environ.get("GRADPRUNE_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradprune"


def proved_tape(
    tape: Tape, tensors: Sequence[torch.Tensor], name: str, hypothesis: Hypothesis
) -> tuple[Verdict, Admission]:
    """The verdict on a tape and the sizes for which it holds, from the folder or made now. `name` is for a reader."""
    key = key_of(tape, tensors, hypothesis)
    known = load(key)
    if known is not None and known[1].admits(shapes_of(tape, tensors)):
        return replace(known[0], subject=name), known[1]
    verdict, admission = prove_program(program_of(tape, tensors, name), hypothesis)
    if not _is_untraceable(verdict):
        store(key, verdict, admission)
    return verdict, admission


def _is_untraceable(verdict: Verdict) -> bool:
    """Whether it could not be traced: that may be the process's fault, and says nothing of the program."""
    return isinstance(verdict, Refusal) and any(reason.kind == "untraceable" for reason in verdict.reasons)


def shapes_of(tape: Tape, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Size]:
    """Shapes of the leaves of a tape by name."""
    return {leaf.name: tensor.shape for leaf, tensor in zip(tape.leaves, tensors)}


def key_of(tape: Tape, tensors: Sequence[torch.Tensor], hypothesis: Hypothesis) -> str | None:
    """Digest of all that a verdict on a tape depends on; None where part of it has no content that can be named.

    Sizes enter only as far as tracing treats them apart: 0, 1, or more.
    """
    sizes = [[min(size, 2) for size in tensor.shape] for tensor in tensors]
    lines = [str(entry.where) for entry in tape.entries]
    if any(_is_of_user(entry.function) for entry in tape.entries):
        return None
    whole = (FORMAT, _own_code(), torch.__version__, hypothesis.factors, sizes, lines)
    text = repr((whole, tape.content()))
    # An address in a repr names an object of this process.
    return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Digest of this package: with another rule, another verdict."""
    root = Path(gradprune.__file__).parent
    found = hashlib.sha256(gradprune.__version__.encode())
    for file in sorted(file for folder in _CODE for file in (root / folder).glob("*.py")):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


def _is_of_user(function: Callable[..., Any]) -> bool:
    """Whether a call runs an autograd Function that is not torch's: what its code reads has no content to name."""
    owner = getattr(function, "__self__", None)
    is_function = inspect.isclass(owner) and issubclass(owner, torch.autograd.Function)
    return is_function and not owner.__module__.startswith("torch.")


def load(key: str | None) -> tuple[Verdict, Admission] | None:
    """A stored verdict; None where there is none, or the file is not one of ours."""
    where = folder()
    if where is None or key is None:
        return None
    try:
        data = json.loads((where / f"{key}.json").read_text(encoding="utf-8"))
        rules = [_rules(item) for item in data["rules"]]
        return verdict_from_json(data["verdict"]), Admission(rules)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rules(data: dict[str, Any]) -> SizeRules:
    sizes = tuple((str(name), int(dim), str(expression)) for name, dim, expression in data["sizes"])
    limits = {str(symbol): (least, largest) for symbol, (least, largest) in data["limits"].items()}
    return SizeRules(sizes, limits, tuple(map(str, data["guards"])))


def store(key: str | None, verdict: Verdict, admission: Admission) -> None:
    """Keep a verdict. A folder that cannot be written to is no error: the next process proves again."""
    where = folder()
    if where is None or key is None:
        return
    data = {"verdict": verdict.to_json(), "rules": [asdict(rules) for rules in admission.rules]}
    try:
        where.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=where, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(name, where / f"{key}.json")
    except OSError:
        return
