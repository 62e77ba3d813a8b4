"""The pinned wheels of the trainers: fetched from the package registry into a cache, unpacked beside themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PINS = HERE / "pins.txt"
# The files that were pinned, whatever interpreter fetches them: nothing compiled in them is ever imported.
PLATFORM = ["--python-version=3.11", "--platform=manylinux1_x86_64", "--platform=any", "--only-binary=:all:"]


class NoRegistry(RuntimeError):
    """The wheels are not in the cache and the package registry cannot be reached."""


def cache_folder() -> Path:
    """Where the wheels lie: ``$GRADPRUNE_PEERS``, or ``.cache/peers`` in the repository."""
    return Path(os.environ.get("GRADPRUNE_PEERS") or REPOSITORY / ".cache" / "peers")


def pinned() -> dict[str, str]:
    """Distribution -> version, both as `pins.txt` spells them, in its order."""
    lines = [line.split()[0] for line in PINS.read_text().splitlines() if line.strip() and line[0] not in "# "]
    return dict(line.split("==") for line in lines)


def roots() -> dict[str, Path]:
    """Distribution -> the folder that holds its packages, for every pinned trainer; fetches what is missing.

    Raises NoRegistry where a wheel is missing and cannot be fetched, and CalledProcessError where the registry's
    file is not the pinned one.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if any(_wheel(folder, name, version) is None for name, version in pinned().items()):
        _fetch(folder)
    return {name: _unpacked(folder, name, version) for name, version in pinned().items()}


def _wheel(folder: Path, name: str, version: str) -> Path | None:
    return next(iter(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")), None)


def _fetch(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet", *PLATFORM]
    done = subprocess.run([*command, "-r", str(PINS), "-d", str(folder)], capture_output=True, text=True, timeout=240)
    if done.returncode == 0:
        return
    unreachable = ("NewConnectionError", "ConnectionError", "No matching distribution found", "timed out")
    if any(word in done.stderr for word in unreachable):
        raise NoRegistry(done.stderr.strip().splitlines()[-1])
    raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)


def _unpacked(folder: Path, name: str, version: str) -> Path:
    wheel = _wheel(folder, name, version)
    assert wheel is not None, f"{name}=={version} was fetched, but no such wheel lies in {folder}"
    target = wheel.with_suffix("")
    if not target.exists():  # unpacked aside and renamed: two processes may do it at once
        aside = folder / f"{target.name}.{os.getpid()}"
        zipfile.ZipFile(wheel).extractall(aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.exists():
                raise
    inner = next(target.glob("*.data/purelib"), None)  # a wheel that calls itself platform-specific hides them there
    return inner or target
