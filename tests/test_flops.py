"""The report: adds up, merges, keeps its schema, and corrects the MFU claim."""

import json
import math

import pytest

from gradprune.errors import PruneError
from gradprune.flops import FlopReport, Phases, format_flops


def report(live=2, dead=3, **more) -> FlopReport:
    """Phases 10/20/5 a microbatch; dead ones run their forward only."""
    full = Phases(10, 20, 5)
    return FlopReport(
        total=35 * (live + dead),
        live_run=full.scale(live),
        dead_run=Phases(10 * dead),
        dead_pruned=Phases(0, 20 * dead, 5 * dead),
        microbatches_live=live,
        microbatches_dead=dead,
        **more,
    )


def test_total_is_run_plus_pruned():
    one = report()
    assert one.total == one.run.total + one.pruned.total == 175
    assert one.pruned == Phases(0, 60, 15)
    with pytest.raises(PruneError, match=r"total 176 != run 100 \+ pruned 75"):
        FlopReport(total=176, live_run=one.live_run, dead_run=one.dead_run, dead_pruned=one.dead_pruned)


def test_reports_add_over_steps_and_ranks():
    ranks = [report(1, 0, tokens_live=7), report(0, 2, tokens_dead=4, fillers=1), report(3, 1)]
    merged = sum(ranks)
    assert merged == ranks[0] + ranks[1] + ranks[2] == report(4, 3, tokens_live=7, tokens_dead=4, fillers=1)
    assert merged + FlopReport() == merged
    with pytest.raises(TypeError):
        merged + 1


def test_mfu_is_corrected_for_what_never_ran():
    # run: forward 5 x 10, backward 2 x 20, recompute 2 x 5; pruned backward 3 x 20, recompute 3 x 5
    one = report()
    assert (one.model_flops, one.hardware_flops, one.claimed_model_flops) == (90, 100, 150)
    assert one.mfu(2.0, 100.0) == 90 / 200
    assert one.hfu(2.0, 100.0) == 100 / 200
    assert one.claimed_mfu(2.0, 100.0) == 150 / 200


def test_mfu_claim_stands_where_nothing_was_pruned():
    one = report(dead=0)
    assert one.claimed_mfu(1.0, 7.0) == one.mfu(1.0, 7.0)


@pytest.mark.parametrize("seconds, peak", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (math.nan, 1.0)])
def test_mfu_refuses_a_meaningless_time_or_peak(seconds, peak):
    with pytest.raises(PruneError, match="pass a measured time and a peak in FLOP/s"):
        report().mfu(seconds, peak)


def test_metrics_keep_their_schema():
    empty, full, timed = FlopReport(), report(), report()
    keys = list(empty.metrics("perf/"))
    assert keys == list(full.metrics("perf/")) == list(timed.metrics("perf/", seconds=1.0, peak=1e3))
    assert all(key.startswith("perf/") for key in keys)
    assert all(type(value) is float for value in full.metrics().values())
    assert math.isnan(full.metrics()["mfu"])
    metrics = timed.metrics(seconds=1.0, peak=1e3)
    assert (metrics["mfu"], metrics["mfu_claimed"], metrics["flops/pruned_share"]) == (0.09, 0.15, 75 / 175)
    assert metrics["flops/dead/pruned/backward"] == 60.0
    assert (metrics["flops/run"], metrics["flops/model"], metrics["flops/model_claimed"]) == (100.0, 90.0, 150.0)


def test_json_round_trip():
    one = report(tokens_live=3, estimated=2)
    assert FlopReport.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(PruneError, match="do not add up"):
        FlopReport.from_json({**one.to_json(), "total": 1})
    with pytest.raises(TypeError):
        FlopReport.from_json({"totally": 1})


def test_prints_a_table_that_shows_estimates_and_gaps():
    text = str(report(fillers=1))
    assert (
        "dead backward" in text
        and "pruned 42.9% of all FLOPs" in text
        and "1 of these microbatches are fillers" in text
    )
    assert "estimates" not in text and "could not be counted" not in text
    text = str(report(estimated=12, uncounted=4))
    assert "12   are estimates" in text and "4 microbatches could not be counted" in text


@pytest.mark.parametrize(
    "flops, text", [(0, "0  "), (999, "999  "), (1000, "1.000 k"), (1234567, "1.235 M"), (5e21, "5000.000 E")]
)
def test_formats_flops(flops, text):
    assert format_flops(flops) == text
