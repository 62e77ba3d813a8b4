"""Each remedy is needed: without it, ranks hang into their time limit, die on an assertion, or compute other numbers.

The same layouts and patterns pass with the remedy in `test_layouts`, or right here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.megatron.arms import compare_arms, parse_dead
from tests.megatron.layouts import Layout
from tests.megatron.matrix import EXPERT_BIAS, EXPERTS, FULL, OVERLAP, check
from tests.megatron.world import RankError

HANGS = {"Timeout", "RuntimeError", "DistBackendError"}
"""What ranks that wait in vain end with: our limit, or that of the collective."""
LIMIT = 30.0

DP_OVERLAP = Layout("DP2, overlap", 2, ddp=OVERLAP)
CP = Layout("CP2", 2, cp=2)
PIPELINE = Layout("PP2, VPP2", 2, pp=2, vpp=2)
EP = Layout("EP2", 2, ep=2, config=EXPERTS)
STAGE_WITH_BIAS = Layout("PP2, expert bias", 2, pp=2, config=EXPERT_BIAS)
SAVED = Layout(
    "TP2, PP2, saved activations distributed", 4, tp=2, pp=2, config={**FULL, "distribute_saved_activations": True}
)


@pytest.mark.timeout(120)
def test_needs_launch_of_reductions(worlds):
    # Rank 1's last microbatch of step 1 is dead, so no hook launches its reductions; DDP's assertion says so.
    with pytest.raises(RankError, match="Communication call has not been issued") as caught:
        worlds(2).run(compare_arms, DP_OVERLAP, parse_dead("|;|3"), ("launch",), limit=LIMIT)
    assert caught.value.kinds[1] == "AssertionError"


@pytest.mark.timeout(120)
def test_needs_router_counts(worlds):
    dead = parse_dead("0,1;0,1,2;0,1,2")
    check(STAGE_WITH_BIAS, dead, worlds(2).run(compare_arms, STAGE_WITH_BIAS, dead))
    outcomes = worlds(2).run(compare_arms, STAGE_WITH_BIAS, dead, ("router counts",), limit=LIMIT)
    assert any("expert_bias" in name for name in outcomes[0].differences)


@pytest.mark.timeout(120)
def test_needs_router_counts_of_recomputed_layers(worlds):
    layout = Layout("experts, expert bias, full recompute", config={**EXPERT_BIAS, **FULL})
    dead = parse_dead("0,1;0,1,2;0,1,2")
    check(layout, dead, worlds(1).run(compare_arms, layout, dead))
    (outcome,) = worlds(1).run(compare_arms, layout, dead, ("router counts", "trial"), limit=LIMIT)
    assert any("expert_bias" in name for name in outcome.differences)


@pytest.mark.timeout(120)
def test_trial_finds_auxiliary_loss_without_its_refusal(worlds):
    layout = Layout("experts, auxiliary loss", config={**EXPERTS, "moe_aux_loss_coeff": 0.01})
    (outcome,) = worlds(1).run(compare_arms, layout, parse_dead("0,1;2"), ("refusal",), limit=LIMIT)
    assert not outcome.differences and outcome.dead == 0
    assert any("MoEAuxLossAutoScaler" in reason for reason in outcome.reasons)


@pytest.mark.timeout(120)
def test_needs_refusal_or_trial_of_auxiliary_loss(worlds):
    layout = Layout("experts, auxiliary loss", config={**EXPERTS, "moe_aux_loss_coeff": 0.01})
    (outcome,) = worlds(1).run(compare_arms, layout, parse_dead("0,1;2"), ("refusal", "trial"), limit=LIMIT)
    assert any("step 0 main_grad" in name for name in outcome.differences)


@pytest.mark.timeout(120)
def test_keeps_router_auxiliary_loss(worlds):
    layout = Layout("experts, auxiliary loss", config={**EXPERTS, "moe_aux_loss_coeff": 0.01})
    (outcome,) = worlds(1).run(compare_arms, layout, parse_dead("0,1;2"), limit=LIMIT)
    assert not outcome.differences and outcome.dead == 0
    assert any("moe_aux_loss_coeff=0.01" in reason for reason in outcome.reasons)


@pytest.mark.timeout(120)
def test_waits_for_ranks_whose_device_is_slow(worlds):
    # The attention's gather is a Function that is not known, so that there is a trial.
    dead = parse_dead("0,1,2;0,1,2;0,1,2")
    outcomes = worlds(2).run(compare_arms, CP, dead, ("prompt outcomes",), limit=LIMIT)
    check(CP, dead, outcomes)
    assert [outcome.dead for outcome in outcomes] == [6, 6]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_needs_confirmation_of_trials(worlds):
    with pytest.raises(RankError) as caught:
        worlds(2).run(compare_arms, CP, parse_dead("0,1,2;0"), ("prompt outcomes", "confirmation"), limit=LIMIT)
    assert set(caught.value.kinds.values()) <= HANGS


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_needs_stage_gradient(worlds):
    dead = parse_dead("0;1;2")
    check(PIPELINE, dead, worlds(2).run(compare_arms, PIPELINE, dead))
    with pytest.raises(RankError) as caught:
        worlds(2).run(compare_arms, PIPELINE, dead, ("stage gradient",), limit=LIMIT)
    assert set(caught.value.kinds.values()) <= HANGS


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_needs_agreement(worlds):
    dead = parse_dead("0|;1|1")
    check(EP, dead, worlds(2).run(compare_arms, EP, dead))
    with pytest.raises(RankError) as caught:
        worlds(2).run(compare_arms, EP, dead, ("agreement",), limit=LIMIT)
    assert set(caught.value.kinds.values()) <= HANGS


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_needs_input_alias(worlds):
    dead = parse_dead("0;1;2")
    check(SAVED, dead, worlds(4).run(compare_arms, SAVED, dead))
    with pytest.raises(RankError, match=r"shape|size"):
        worlds(4).run(compare_arms, SAVED, dead, ("input alias",), limit=LIMIT)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("setting", ["moe_z_loss_coeff", "seq_aux_loss", "global_aux_loss"])
def test_needs_refusal_of_every_router_loss(worlds, setting):
    more = {"moe_z_loss_coeff": 0.01}
    if setting != "moe_z_loss_coeff":
        more = {"moe_router_load_balancing_type": setting, "moe_aux_loss_coeff": 0.01}
    layout = replace(Layout("experts"), config={**EXPERTS, **more})
    (kept,) = worlds(1).run(compare_arms, layout, parse_dead("0,1;2"), limit=LIMIT)
    assert not kept.differences and kept.dead == 0
    (outcome,) = worlds(1).run(compare_arms, layout, parse_dead("0,1;2"), ("refusal", "trial"), limit=LIMIT)
    assert any("main_grad" in name for name in outcome.differences)
