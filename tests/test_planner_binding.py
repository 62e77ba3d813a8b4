"""Binding a plan to batches: identity, order, early ends, nesting."""

import gc
from itertools import count

import numpy as np
import pytest
import torch

from gradprune.errors import PlanError
from gradprune.planner import StepPlan, any_current, planned

PLAN = StepPlan.from_rollout(np.array([0.0, 1.0, 0.0]), None, 1)


def batches() -> list[dict[str, torch.Tensor]]:
    return [{"row": torch.tensor([i])} for i in range(3)]


def flag(batch: object) -> bool | None:
    found = planned(batch)
    return None if found is None else found.dead


def test_links_each_batch_while_it_is_current():
    data = batches()
    seen = []
    for batch in PLAN.bind(data):
        assert batch is data[len(seen)]
        seen.append(flag(batch))
        assert [flag(other) for other in data if other is not batch] == [None, None]
    assert seen == [True, False, True]
    assert [flag(batch) for batch in data] == [None] * 3 and not any_current()


def test_does_not_link_an_equal_batch_that_is_another_object():
    for batch in PLAN.bind(batches()):
        assert planned(dict(batch)) is None and any_current()


def test_links_tensors_and_the_same_object_again():
    batch = torch.zeros(2)
    assert [flag(item) for item in PLAN.bind([batch] * 3)] == [True, False, True]


def test_takes_exactly_its_count_from_a_long_lived_iterator():
    source = count()
    assert list(PLAN.bind(source)) == [0, 1, 2]
    assert next(source) == 3


def test_reports_an_iterator_that_ends_early():
    bound = PLAN.bind(iter(batches()[:2]))
    with pytest.raises(PlanError, match="the plan has 3 microbatches, the iterator ended after 2"):
        list(bound)
    assert not any_current()


def test_reports_a_list_of_another_length_at_once():
    with pytest.raises(PlanError, match="the plan has 3 microbatches, the data has 4"):
        PLAN.bind([1, 2, 3, 4])


def test_reports_what_cannot_be_iterated():
    with pytest.raises(PlanError, match="bind was given a int"):
        PLAN.bind(3)  # type: ignore[arg-type]


def test_forgets_when_left_early():
    data = batches()
    for _ in PLAN.bind(data):
        break
    gc.collect()
    assert planned(data[0]) is None and not any_current()


def test_forgets_when_the_loop_raises():
    data = batches()

    def loop() -> None:
        for _ in PLAN.bind(data):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    gc.collect()
    assert not any_current()


def test_close_forgets_but_keeps_the_place():
    bound = PLAN.bind(data := batches())
    next(bound)
    bound.close()
    assert planned(data[0]) is None and bound.current is None
    assert next(bound) is data[1]


def test_two_passes_of_one_plan():
    first, second = batches(), batches()
    for _ in range(2):
        pairs = zip(PLAN.bind(first), PLAN.bind(second))
        assert [(flag(one), flag(two)) for one, two in pairs] == [(True, True), (False, False), (True, True)]


def test_nested_plans_on_the_same_object():
    data = batches()
    other = StepPlan.from_rollout(np.ones(3), None, 1)
    for outer in PLAN.bind(data):
        dead = flag(outer)
        assert [flag(inner) for inner in other.bind(data)] == [False] * 3
        assert flag(outer) == dead


def test_refuses_a_second_pass_over_a_used_bound_plan():
    bound = PLAN.bind(batches())
    list(bound)
    with pytest.raises(PlanError, match="were used: call"):
        iter(bound)


def test_serves_schedules_that_peek_and_stages_that_read_nothing():
    bound = PLAN.bind(data := iter(batches()))
    assert bound.upcoming is PLAN.ranks[0][0] and bound.current is None
    next(bound)
    assert bound.current is PLAN.ranks[0][0] and bound.upcoming is PLAN.ranks[0][1]
    bound.skip()
    assert bound.position == 2 and bound.current is None
    assert next(bound)["row"].item() == 1 and len(list(data)) == 1
    with pytest.raises(PlanError, match="all 3 microbatches"):
        bound.skip()


def test_binds_no_data():
    bound = PLAN.bind(None)
    assert [(batch, bound.current.dead) for batch in bound] == [(None, True), (None, False), (None, True)]
    assert planned(None) is None


def test_needs_a_rank_where_there_are_several():
    two = StepPlan(PLAN.ranks * 2)
    with pytest.raises(PlanError, match="2 ranks: pass rank="):
        two.bind(batches())
    with pytest.raises(PlanError, match="rank is 2, the plan has 2 ranks"):
        two.bind(batches(), rank=2)
    assert len(list(two.bind(batches(), rank=1))) == 3
