"""``python -m tests.peers.table > docs/peers.md``: the committed verdict table for a reader."""

from __future__ import annotations

from collections.abc import Iterator

from tests.peers import expected, wheels
from tests.peers.expected import Line

HEAD = """# What the prover says of released trainers' losses

Made by `python -m tests.peers.table` from `tests/peers/expected.json`; the tests load the pinned wheels, measure every
gradient, prove every loss, and compare. Releases: {releases}.

- **zero**: measured: is the gradient exactly zero where all advantages are 0 (`adv`), or where only the product of
  advantages and mask is 0 at every position (`adv * mask`)? The advantages here are one per token; a loss that reads
  one column of them as the row's advantage does not have the second property.
- **verdict**: *proved, per row* also holds for single rows among live ones; *proved* holds for whole microbatches.
  `finite(...)` is what the proof needs of that line's value and the dead path watches.
- *refused* names the line through which gradient flows, or where the zero is lost.

{counts}
"""


def render() -> str:
    lines = {name: line for name, line in expected.load().items() if not expected.is_variant(name)}
    releases = ", ".join(f"{name} {version}" for name, version in wheels.pinned().items())
    parts = [HEAD.format(releases=releases, counts=_counts(lines))]
    for trainer in dict.fromkeys(name.split("/")[0] for name in lines):
        parts += [
            f"## {trainer}\n",
            "| loss | hypothesis | zero | verdict | condition or line |",
            "|---|---|---|---|---|",
        ]
        for name, line in lines.items():
            if name.startswith(f"{trainer}/"):
                parts += _rows(name.split("/", 1)[1], line)
        parts.append("")
    return "\n".join(parts)


def _counts(lines: dict[str, Line]) -> str:
    found = []
    for zero, truth in (("adv", "zero_microbatch"), ("adv * mask", "zero_product")):
        provable = [line for line in lines.values() if truth in line["truth"]]
        proved = sum(line[zero]["proved"] for line in provable)
        unsound = sum(line[zero]["proved"] for line in lines.values() if truth not in line["truth"])
        found.append(f"`{zero} == 0`: {proved} of {len(provable)} provable losses proved, {unsound} wrongly.")
    return f"{len(lines)} losses. {' '.join(found)}"


def _rows(loss: str, line: Line) -> Iterator[str]:
    for zero, truth in (("adv", "zero_microbatch"), ("adv * mask", "zero_product")):
        verdict = line[zero]
        details = verdict["conditions"] if verdict["proved"] else verdict["because"]
        kind = ("proved, per row" if verdict["per_row"] else "proved") if verdict["proved"] else "refused"
        cells = [loss, f"`{zero}`", "yes" if truth in line["truth"] else "no", kind, "<br>".join(map(_cell, details))]
        yield f"| {' | '.join(cells)} |"


def _cell(detail: str) -> str:
    kind, _, place = detail.partition(": ")
    file, _, text = place.partition(": ")
    return f"{kind}: {file}: `{text.replace('|', chr(92) + '|')}`" if text else detail


if __name__ == "__main__":
    print(render(), end="")
