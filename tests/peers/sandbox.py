"""Imports of a trainer's files without its dependencies, and without a trace in `sys.modules`."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, ClassVar


class Fake:
    """Stands for anything a trainer imports and its losses never use: callable, falsy, with every attribute.

    Called with one function or class it gives that back, as a decorator does.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _fake(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        decorates = len(args) == 1 and not options and isinstance(args[0], types.FunctionType | type)
        return args[0] if decorates else self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __getitem__(self, item: Any) -> Fake:
        return self

    def __or__(self, other: Any) -> Fake:
        return self

    __ror__ = __or__


def _fake(dotted: str) -> Any:
    """A class for a capitalised name (it may be inherited from, subscripted, made with anything), else a `Fake`."""
    name = dotted.rsplit(".", 1)[-1]
    if not name.lstrip("_")[:1].isupper():
        return Fake(dotted)
    members = {
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__init__": lambda self, *args, **options: None,
        "__module__": "fake",
    }
    return type(name, (), members)


class _FakeModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _fake(name)
        setattr(self, name, value)
        return value


class Sandbox(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import names under `root` that match a pattern of `real` from their files; fake the rest of `packages`.

    While entered, no module of `packages` that the process has imported is seen; on leaving, those that were there
    come back, and the sandbox keeps its own to enter again.
    """

    def __init__(self, root: Path, packages: tuple[str, ...], real: tuple[str, ...]) -> None:
        self.root, self.packages, self.real = root, packages, real
        self.own: dict[str, types.ModuleType] = {}
        self.outside: dict[str, types.ModuleType] = {}

    def __enter__(self) -> Sandbox:
        self.outside = self._swap(self.own)
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)
        self.own = self._swap(self.outside)

    def _swap(self, incoming: dict[str, types.ModuleType]) -> dict[str, types.ModuleType]:
        taken = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in self.packages}
        sys.modules.update(incoming)
        return taken

    def load(self, name: str) -> Any:
        """The module `name`, imported inside the sandbox."""
        with self:
            return importlib.import_module(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.packages:
            return None
        if any(fnmatch.fnmatch(name, pattern) for pattern in self.real):
            base = self.root / name.replace(".", "/")
            package = base / "__init__.py"
            file = package if package.exists() else base.with_suffix(".py")
            where = [str(base)] if file is package else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=where)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _FakeModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A fake has no code."""


class Settings(dict):
    """A config whose keys read as attributes too, as the trainers' configs do."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None
