"""Attributes of foreign objects, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` while open; afterwards what it was, and absent again if it was inherited."""
    own = vars(owner)
    inherited = name not in own
    before = own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is not value:
            pass  # somebody else replaced it since, for good
        elif inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
