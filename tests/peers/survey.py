"""What is measured of each loss and what the prover says of it, as JSON-able rows.

Runs in a process of its own, ``python -m tests.peers.survey verl skyrl ...``, which prints one row a line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gradprune import prove
from gradprune.facts import Certificate, Verdict
from tests.peers import refusals, truth, wheels
from tests.peers.conditions import broken
from tests.peers.loaders import load
from tests.peers.variants import FAMILIES, variants

REPOSITORY = Path(__file__).parents[2]
HYPOTHESES = ("adv", "adv * mask")
ROW_TRAINERS = ("trl", "liger", "unsloth")  # their losses take one advantage a row
Row = dict[str, Any]


def row(name: str, loss: Callable[..., torch.Tensor]) -> Row:
    """Truth, both verdicts, and what two overflows do to the gradient and to the conditions of a proof."""
    start = time.perf_counter()
    verdicts = {zero: prove(loss, truth.draw(0).args(), zero=zero, wrt="logp") for zero in HYPOTHESES}
    seconds = time.perf_counter() - start
    return {
        "name": name,
        "truth": asdict(truth.measure(loss)),
        "verdicts": {zero: verdict.to_json() for zero, verdict in verdicts.items()},
        "overflow": {zero: _overflows(loss, zero, verdict) for zero, verdict in verdicts.items()},
        "seconds": seconds,
    }


def dead_batch(zero: str, seed: int = truth.DRAWS[0]) -> truth.Batch:
    """A batch of which the hypothesis is true: no advantages at all, or none where the mask is one."""
    batch = truth.draw(seed)
    if zero == "adv":
        return replace(batch, adv=torch.zeros_like(batch.adv))
    return truth.holed(batch, seed)


def _overflows(loss: Callable[..., torch.Tensor], zero: str, verdict: Verdict) -> dict[str, Row] | None:
    """For an infinite ratio at a valid and at a masked token of a dead batch: NaN or not, and conditions broken."""
    if not isinstance(verdict, Certificate):
        return None
    batch, found = dead_batch(zero), {}
    for place, value in (("none", None), ("valid", 1), ("masked", 0)):
        case = batch if value is None else truth.overflowing(batch, *(batch.mask == value).nonzero()[0].tolist())
        found[place] = _overflow(loss, verdict, case)
    return found


def _overflow(loss: Callable[..., torch.Tensor], verdict: Certificate, case: truth.Batch) -> Row:
    try:
        with torch.compiler.set_stance("force_eager"):
            zero = bool((truth.gradient(loss, case) == 0).all())
        return {"zero": zero, "broken": [str(condition) for condition in broken(verdict.conditions, loss, case)]}
    except (AssertionError, ValueError):  # the loss refuses such a batch by itself
        return {"zero": True, "broken": []}


def inexact(rows: Iterable[Row], zero: str, place: str) -> dict[str, Row]:
    """The cases of `overflow` in which conditions broke and the gradient was zero, or neither."""
    cases = {row["name"]: row["overflow"][zero][place] for row in rows if row["overflow"][zero] is not None}
    return {name: case for name, case in cases.items() if case["zero"] == bool(case["broken"])}


def refusal(name: str, loss: Callable[..., torch.Tensor]) -> Row:
    """Truth and verdict of a loss with a live term, for ``zero="adv"``."""
    verdict = prove(loss, truth.draw(0).args(), zero="adv", wrt="logp")
    return {"name": name, "truth": asdict(truth.measure(loss)), "verdict": verdict.to_json()}


def by_row(name: str, loss: Callable[..., torch.Tensor]) -> Row:
    """The same loss with one advantage a row, ``adv [R]``: verdict for ``zero="adv * mask"``, and the truth of it.

    In the batch of the truth each row has no advantage or no valid token.
    """

    def of_rows(logp, old, adv, mask, ref):
        return loss(logp, old, adv.unsqueeze(1), mask, ref)

    batch = truth.draw(truth.DRAWS[0])
    adv, mask = torch.tensor([0.0, 0.0, 1.2, -0.7, 0.0, 0.4]), batch.mask.clone()
    mask[adv != 0] = 0
    dead = replace(batch, adv=adv, mask=mask)
    verdict = prove(of_rows, dead.args(), zero="adv * mask", wrt="logp")
    return {"name": name, "zero": bool((truth.gradient(of_rows, dead) == 0).all()), "verdict": verdict.to_json()}


def rows(names: Sequence[str]) -> Iterator[Row]:
    """The rows of whole trainers, families of variants, "refusals" and "by_row", or of single losses of these.

    A single loss of the last two is ``"refusals:trl/dapo+kl"``.
    """
    roots = wheels.roots() if any(name.split("/")[0] not in FAMILIES for name in names) else {}
    for kind in dict.fromkeys(_kind(name) for name in names):
        wanted = {name.partition(":")[2] or name for name in names if _kind(name) == kind}
        if kind == "refusals":
            measure, found = refusal, refusals.losses(roots)
        elif kind == "by_row":
            measure, found = by_row, {k: v for trainer in ROW_TRAINERS for k, v in load(trainer, roots).items()}
        else:
            measure, found = row, variants(kind) if kind in FAMILIES else load(kind, roots)
        yield from (measure(name, loss) for name, loss in found.items() if kind in wanted or name in wanted)


def _kind(name: str) -> str:
    return name.split(":")[0] if ":" in name else name.split("/")[0]


def run(names: Sequence[str], processes: int = 2) -> list[Row]:
    """The rows of `names`, from some processes of their own. Raises RuntimeError where one fails."""
    share = -(-len(names) // processes)
    command = [sys.executable, "-m", "tests.peers.survey"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, *part], cwd=REPOSITORY, env=environment, stdout=-1, stderr=-1, text=True)
        for part in (names[start : start + share] for start in range(0, len(names), share))
    ]
    found: list[Row] = []
    for process in started:
        out, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(map(str, process.args))} failed:\n{errors[-3000:]}")
        found += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="as for rows()")
    for found in rows(parser.parse_args().names):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
