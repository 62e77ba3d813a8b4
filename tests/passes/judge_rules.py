"""Runs the tests of the rules in this process, quickest first: exits with 1 at the first failure, 0 if there is none.

``python -m tests.passes.judge_rules``; prints where it found the analysis, so that a caller knows which one it judged.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import gradprune.passes
from tests.passes.hostile_snippets import HOSTILE
from tests.passes.snippets import DERIVED
from tests.passes.test_rules import (
    test_claims_nothing_false_of,
    test_closes_no_claims_that_differ,
    test_derives,
    test_forgets_positions_in_sizes_that_may_be_broadcast,
    test_refuses_positions_drawn_twice,
    test_refuses_sizes_that_may_be_broadcast,
    try_rules,
)

ROUNDS = 12


def main() -> int:
    print(Path(gradprune.passes.__file__).parent)
    try:
        for name in DERIVED:
            test_derives(name)
        for name in HOSTILE:
            test_claims_nothing_false_of(name)
        test_closes_no_claims_that_differ()
        test_refuses_sizes_that_may_be_broadcast()
        test_refuses_positions_drawn_twice()
        test_forgets_positions_in_sizes_that_may_be_broadcast()
        for turn in range(ROUNDS):
            try_rules(range(turn, turn + 1))
    except Exception:  # noqa: BLE001 - whatever a broken rule raises, it was noticed
        traceback.print_exc(file=sys.stdout)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
