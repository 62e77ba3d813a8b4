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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gradprune import prove
from gradprune.facts import Certificate, Verdict
from tests.peers import refusals, truth, wheels
from tests.peers.conditions import broken
from tests.peers.loaders import TRAINERS, load
from tests.peers.variants import FAMILIES, variants

REPOSITORY = Path(__file__).parents[2]
HYPOTHESES = ("adv", "adv * mask")
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


def refusal(name: str, loss: Callable[..., torch.Tensor]) -> Row:
    """Truth and verdict of a loss with a live term, for ``zero="adv"``."""
    verdict = prove(loss, truth.draw(0).args(), zero="adv", wrt="logp")
    return {"name": name, "truth": asdict(truth.measure(loss)), "verdict": verdict.to_json()}


def rows(names: Sequence[str]) -> Iterator[Row]:
    """The rows of trainers and of families of variants, by name, and of "refusals"."""
    roots = wheels.roots() if {*names} & {*TRAINERS, "refusals"} else {}
    for name in names:
        if name == "refusals":
            yield from (refusal(*item) for item in refusals.losses(roots).items())
        else:
            found = load(name, roots) if name in TRAINERS else variants(name)
            yield from (row(*item) for item in found.items())


def run(shares: Sequence[Sequence[str]]) -> list[Row]:
    """The rows of all `shares`, one process for each share. Raises RuntimeError where one fails."""
    command = [sys.executable, "-m", "tests.peers.survey"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, *share], cwd=REPOSITORY, env=environment, stdout=-1, stderr=-1, text=True)
        for share in shares
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
    parser.add_argument("names", nargs="+", choices=[*TRAINERS, *FAMILIES, "refusals"])
    for found in rows(parser.parse_args().names):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
