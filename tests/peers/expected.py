"""The committed verdict table: one line of `expected.json` a loss, and how a surveyed row becomes one.

After an upgrade of a trainer or of the prover: ``python -m tests.peers.expected --write`` and read the difference.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.peers import survey
from tests.peers.variants import FAMILIES

FILE = Path(__file__).with_name("expected.json")
# Trainers and families in an order that gives two processes about the same work.
ALL = ("trl", "openrlhf", "trinity", "unsloth", "control", "tokens", "coupled", "policies")
ALL += ("verl", "areal", "skyrl", "liger", "sequences", "machinery", "live", "packed")
UNQUOTED = {"rl_replacements.py"}  # AGPL: run, not quoted
Line = dict[str, Any]


def summary(row: Mapping[str, Any]) -> Line:
    """A surveyed row without what differs between machines: no paths, line numbers or times."""
    verdicts = {zero: _verdict(verdict) for zero, verdict in row["verdicts"].items()}
    return {"truth": [key for key, value in row["truth"].items() if value], **verdicts}


def _verdict(verdict: Mapping[str, Any]) -> Line:
    if not verdict["proved"]:
        return {"proved": False, "because": _unique(_reason(reason) for reason in verdict["reasons"])}
    conditions = _unique(f"{item['kind']}({item['value']}){_place(item)}" for item in verdict["conditions"])
    return {"proved": True, "per_row": verdict["per_row"], "paths": verdict["paths"], "conditions": conditions}


def _reason(reason: Mapping[str, Any]) -> str:
    return f"{reason['kind']}{_place(reason)}"


def _place(item: Mapping[str, Any]) -> str:
    where = item["where"]
    if not where:
        return ""
    file = Path(where["file"]).name
    return f": {file}: {where['text'] if file not in UNQUOTED else 'in ' + where['function']}"


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def load() -> dict[str, Line]:
    """Name -> line, trainers first."""
    lines: dict[str, Line] = json.loads(FILE.read_text())
    return lines


def dump(lines: Mapping[str, Line]) -> str:
    """JSON with one loss a line, so that a changed verdict is a changed line."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(line)}" for name, line in lines.items())
    return f"{{\n{rows}\n}}\n"


def sample(names: Iterable[str], size: int) -> list[str]:
    """The same `size` names every time, in their order."""
    names = list(names)
    chosen = set(random.Random(7).sample(names, size))
    return [name for name in names if name in chosen]


def is_variant(name: str) -> bool:
    return name.split("/")[0] in FAMILIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} instead of printing it")
    write = parser.parse_args().write
    rows = survey.run(ALL)
    text = dump({row["name"]: summary(row) for row in sorted(rows, key=lambda row: row["name"])})
    if write:
        FILE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
