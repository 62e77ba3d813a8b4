"""The meter: what it counts, what it concludes without counting, and what it admits to not knowing."""

import time

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gradprune.counting import meter as meter_module
from gradprune.counting.fit import BatchShape
from gradprune.counting.meter import FlopMeter
from gradprune.counting.tape import Tape, record_backward, record_forward
from gradprune.flops import Phases
from tests.counting import assert_same, count_dead, count_live, gradients, torch_counts
from tests.decoders import KINDS, DecoderConfig, make_decoder, make_tokens, policy_loss


@pytest.mark.parametrize("kind", KINDS)
def test_counts_what_torch_counts_and_changes_no_bit(kind):
    model, tokens, meter = make_decoder(KINDS[kind]), make_tokens(2, 7), FlopMeter()
    plain = policy_loss(model(tokens))
    plain.backward()
    expected = gradients(model)
    loss = count_live(meter, "k", lambda: policy_loss(model(tokens)))
    assert torch.equal(loss, plain)
    loss.backward()
    assert_same(gradients(model), expected)
    phases = meter.cost("k").phases
    assert (phases.forward, phases.backward + phases.recompute) == torch_counts(lambda: policy_loss(model(tokens)))
    assert (phases.recompute > 0) == (model.config.checkpointing != "none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_microbatch_inherits_from_a_live_one_of_other_shape(kind):
    model, meter = make_decoder(KINDS[kind]), FlopMeter()
    count_live(meter, (2, 7), lambda: policy_loss(model(make_tokens(2, 7)))).backward()
    count_dead(meter, (3, 11), lambda: policy_loss(model(make_tokens(3, 11, seed=1))))
    inherited = meter.cost((3, 11))
    assert inherited.exact
    assert meter.wants((3, 11))
    count_live(meter, (3, 11), lambda: policy_loss(model(make_tokens(3, 11, seed=1)))).backward()
    assert meter.cost((3, 11)) == inherited


@pytest.mark.parametrize("kind", ["dense", "biased", "gqa", "wide-heads", "moe", "lora", "tied"])
def test_a_dead_forward_alone_gives_the_backward(kind):
    model, meter = make_decoder(KINDS[kind]), FlopMeter()
    count_dead(meter, "k", lambda: policy_loss(model(make_tokens(2, 7))))
    derived = meter.cost("k")
    assert not derived.exact
    forward, backward = torch_counts(lambda: policy_loss(model(make_tokens(2, 7))))
    assert derived.phases == Phases(forward, backward)


@pytest.mark.parametrize("frozen", [(), ("blocks.0.q",), ("blocks.1",), ("blocks.0", "embedding"), ("head",)])
def test_frozen_weights_cost_no_gradient(frozen):
    model = make_decoder(DecoderConfig(bias=True))
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    meter = FlopMeter()
    count_dead(meter, "dead", lambda: policy_loss(model(make_tokens(2, 9))))
    alone = meter.cost("dead").phases
    count_live(meter, "live", lambda: policy_loss(model(make_tokens(2, 5)))).backward()
    forward, backward = torch_counts(lambda: policy_loss(model(make_tokens(2, 9))))
    assert alone == meter.cost("dead").phases == Phases(forward, backward)
    assert meter.cost("dead").exact


def test_what_is_detached_needs_no_gradient():
    # 3 x 4 times 4 x 4: 96 FLOPs a product. The second has one gradient of two, as its input is detached. That nobody
    # asks for the first one's gradient then, a forward alone cannot show: an estimate.
    weight, other = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    meter = FlopMeter()
    detached = lambda: ((torch.ones(3, 4) @ weight).detach() @ other).sum()  # noqa: E731
    count_dead(meter, "detached", detached)
    count_dead(meter, "kept", lambda: ((torch.ones(3, 4) @ weight) @ other).sum())
    assert meter.cost("detached").phases == Phases(2 * 96, (1 + 1) * 96) and not meter.cost("detached").exact
    assert meter.cost("kept").phases == Phases(2 * 96, (1 + 2) * 96)
    count_live(meter, "detached", detached).backward()
    assert meter.cost("detached").phases == Phases(2 * 96, 96) and meter.cost("detached").exact


@pytest.mark.parametrize("frozen", [False, True])
def test_an_expert_without_tokens_says_nothing_of_one_with(frozen):
    experts = [torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=not frozen)]

    def route(*counts):
        return sum((torch.ones(n, 4) @ weight).sum() for n, weight in zip(counts, experts))

    meter = FlopMeter()
    count_live(meter, "live", lambda: route(5, 0)).backward()
    count_dead(meter, "dead", lambda: route(2, 3))
    # 32 FLOPs a row and product, one gradient where the weight is not frozen
    assert meter.cost("dead").phases == Phases(5 * 32, (2 if frozen else 5) * 32)


def test_an_exception_in_the_forward_leaves_the_key_uncounted():
    meter = FlopMeter()
    with pytest.raises(ArithmeticError), meter.counting_forward("k"):
        raise ArithmeticError
    assert _get_current_dispatch_mode() is None
    assert meter.wants("k") and meter.cost("k") is None


def test_an_inner_no_grad_region_is_no_claim_of_exactness():
    # The scorer's product looks differentiable to a dead forward: an estimate, until a live step shows that it is not.
    # 5 rows times 4 x 4: 160 FLOPs a product; x needs no gradient, so that the backward has one product.
    weight = torch.randn(4, 4, requires_grad=True)

    def step(rows):
        x = torch.ones(rows, 4)
        with torch.no_grad():
            score = (x @ weight).sum()
        return (x @ weight).sum() * score

    meter = FlopMeter()
    count_dead(meter, 5, lambda: step(5))
    assert not meter.cost(5).exact and meter.cost(5).phases == Phases(2 * 160, 2 * 160)
    count_live(meter, 3, lambda: step(3)).backward()
    assert meter.cost(5).exact and meter.cost(5).phases == Phases(2 * 160, 160)


def test_report_adds_up_by_kind_and_fate():
    model, meter = make_decoder(KINDS["reentrant"]), FlopMeter()
    count_live(meter, "k", lambda: policy_loss(model(make_tokens(2, 7))), tokens=12).backward()
    one = meter.cost("k").phases
    meter.live("k", 11, padding=3)
    meter.dead("k", 9, padding=5)
    meter.dead("k", 9, forward=False)
    meter.dead("k", 9, backward=True)
    meter.dead("k", 0, padding=1, filler=True)
    report = meter.report()
    assert report.total == 6 * one.total
    assert report.live_run == one.scale(2) and report.live_pruned == Phases()
    assert report.dead_run == Phases(3 * one.forward, one.backward, one.recompute)
    assert report.dead_pruned == Phases(one.forward, 3 * one.backward, 3 * one.recompute)
    assert (report.microbatches_live, report.microbatches_dead, report.fillers) == (2, 4, 1)
    assert (report.tokens_live, report.tokens_dead, report.padding_live, report.padding_dead) == (23, 27, 3, 6)
    assert (report.estimated, report.uncounted) == (0, 0)
    meter.reset()
    assert meter.report().total == 0 and not meter.wants("k")


def test_a_live_forward_that_came_out_dead_is_counted_again_when_live():
    # 3 x 4 times 4 x 4: 96 FLOPs a product, one gradient
    weight, meter = torch.randn(4, 4, requires_grad=True), FlopMeter()
    with meter.counting_forward("k"):
        (torch.ones(3, 4) @ weight).sum()
    assert meter.wants("k") and not meter.wants("k", dead=True)
    loss = count_live(meter, "k", lambda: (torch.ones(3, 4) @ weight).sum())
    assert not meter.wants("k")  # though its backward is still to come
    loss.backward()
    assert meter.cost("k").phases == Phases(96, 96) and meter.cost("k").exact


def test_says_what_it_could_not_count():
    meter = FlopMeter()
    meter.live("never counted", 5)
    assert meter.report().uncounted == 1 and meter.report().total == 0


def test_estimates_are_counted_as_estimates():
    model, meter = make_decoder(KINDS["dense"]), FlopMeter()
    count_dead(meter, "k", lambda: policy_loss(model(make_tokens(2, 7))))
    report = meter.report()
    assert report.estimated == report.pruned.total > 0


@pytest.mark.parametrize("kind", ["gqa", "non-reentrant", "lora"])
def test_stops_counting_once_shapes_determine_each_other(kind):
    model, meter = make_decoder(KINDS[kind]), FlopMeter()
    sizes = [(1 + seed * 7 % 5, 3 + seed * 11 % 17) for seed in range(24)]
    assert len(set(sizes)) == 24
    counted = 0
    for rows, length in sizes:
        tokens = make_tokens(rows, length)
        key = BatchShape.of([tokens, tokens[:, 0]])
        if meter.wants(key):
            counted += 1
            count_live(meter, key, lambda tokens=tokens: policy_loss(model(tokens))).backward()
        else:
            predicted = meter.cost(key)
            assert predicted.exact
            tape = Tape()
            with record_forward(tape):
                loss = policy_loss(model(tokens))
            record_backward(tape, loss)
            loss.backward()
            assert predicted.phases == tape.measured()
        meter.live(key, tokens.numel())
    assert counted < 16
    assert meter.report().uncounted == meter.report().estimated == 0


def test_keeps_counting_where_shapes_do_not_determine_the_cost():
    weight, meter = torch.randn(4, 4, requires_grad=True), FlopMeter()

    def step(rows):
        x = torch.ones(rows, 4)
        for _ in range(rows % 3 + 1):
            x = x @ weight
        return x.sum()

    for rows in range(1, 30):
        key = BatchShape(((rows, 4),))
        assert meter.wants(key)
        count_live(meter, key, lambda rows=rows: step(rows)).backward()


def test_counting_ends_and_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(meter_module, "MAX_COUNTED", 3)
    monkeypatch.setattr(meter_module, "MAX_TALLIES", 4)
    weight, meter = torch.randn(4, 4, requires_grad=True), FlopMeter()
    for rows in range(1, 11):
        if meter.wants(rows):
            count_live(meter, rows, lambda rows=rows: (torch.ones(rows, 4) @ weight).sum()).backward()
        else:
            meter.live(rows, 0)
    report = meter.report()
    # rows 1 to 3 are counted: 32 FLOPs a row forward, as many backward; the other seven are missing, and said to be
    assert (report.total, report.uncounted, report.microbatches_live) == (64 * (1 + 2 + 3), 7, 10)
    assert len(meter._live) <= 4


@pytest.mark.parametrize("counted", [True, False])
def test_a_microbatch_costs_the_hot_path_little(counted):
    weight, meter = torch.randn(4, 4, requires_grad=True), FlopMeter()
    shape = lambda rows: BatchShape(((rows, 16),) * 6, lengths=(16,) * rows)  # noqa: E731
    for rows in range(1, 6):
        count_live(meter, shape(rows), lambda rows=rows: (torch.ones(rows, 4) @ weight).sum()).backward()
    key = shape(5 if counted else 32)
    assert not meter.wants(key)
    assert (key in meter._live_tapes) == counted
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            meter.wants(key)
            meter.live(key, 64)
            meter.dead(key, 64)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 20e-6  # two microbatches


def test_losses_without_a_graph_are_counted_once():
    meter, key = FlopMeter(), BatchShape(((3, 4),))
    counted = 0
    for _ in range(5):
        if meter.wants(key):
            counted += 1
            with meter.counting_forward(key):
                loss = (torch.ones(3, 4) @ torch.ones(4, 2)).sum()
            meter.count_backward(key, loss)
        meter.live(key, 12)
    assert counted == 1 and meter.report().microbatches_live == 5
