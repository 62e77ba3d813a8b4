"""What follows from counted shapes: exactly inside their span, nothing outside, nothing once contradicted."""

import pytest

from gradprune.counting.fit import REDUNDANT, BatchShape, ShapeFit
from gradprune.flops import Phases


def cost(shape: BatchShape) -> Phases:
    """A transformer over [R, T] tokens: 12 per slot and 4 per squared length, the backward thrice, recompute half."""
    (rows, length), *_ = shape.shapes
    forward = rows * length * (12 + 4 * length)
    return Phases(forward, 3 * forward, forward // 2)


def batch(rows: int, length: int, lengths=None) -> BatchShape:
    return BatchShape(((rows, length), (rows,)), lengths)


def learned(sizes, cost=cost) -> ShapeFit:
    fit = ShapeFit()
    for rows, length in sizes:
        fit.learn(batch(rows, length).features(), cost(batch(rows, length)))
    return fit


SIZES = [(1, 3), (2, 5), (3, 4), (4, 9), (5, 6), (2, 8), (6, 3), (3, 11), (7, 2), (1, 12)]


def test_predicts_exactly_inside_the_span():
    fit = learned(SIZES)
    for rows, length in [(9, 17), (1, 1), (64, 4096), (10**6, 10**6)]:
        assert fit.predict(batch(rows, length).features()) == cost(batch(rows, length))


def test_keeps_silent_before_the_fit_is_confirmed():
    # the same shape twice confirms the fit once
    for times in range(1, 5):
        fit = learned([(2, 5)] * times)
        assert (fit.predict(batch(2, 5).features()) is None) == (times - 1 < REDUNDANT)


def test_keeps_silent_outside_the_span():
    fit = learned([(2, 5), (2, 5), (2, 5), (4, 5), (8, 5)])
    assert fit.predict(batch(6, 5).features()) == cost(batch(6, 5))  # rows alone differ: a parabola through three
    assert fit.predict(batch(2, 6).features()) is None


def test_keeps_silent_once_contradicted():
    fit = learned(SIZES)
    fit.learn(batch(2, 5).features(), Phases(1, 2, 3))
    assert fit.predict(batch(2, 5).features()) is None
    fit = learned(SIZES, cost=lambda shape: Phases(shape.shapes[0][1] ** 3))
    assert fit.predict(batch(2, 5).features()) is None


@pytest.mark.parametrize("lengths", [(3, 9), (12,), ()])
def test_real_lengths_are_sizes_too(lengths):
    def packed(shape):
        return Phases(sum(7 * n + n * n for n in shape.lengths))

    fit = ShapeFit()
    for seed in range(1, 14):
        real = tuple(1 + (seed * step) % 11 for step in range(1, 1 + seed % 4))
        shape = batch(1, sum(real), real)
        fit.learn(shape.features(), packed(shape))
    shape = batch(1, sum(lengths), lengths)
    assert fit.predict(shape.features()) == packed(shape)
    assert shape.kind != batch(1, sum(lengths)).kind


def test_shapes_are_read_from_whatever_has_one():
    class Tensor:
        shape = (2, 3)

    assert BatchShape.of([Tensor(), 4, "name", None, Tensor()], [3, 3]) == BatchShape(((2, 3), (2, 3)), (3, 3))
    assert BatchShape.of([Tensor()], program="a").kind != BatchShape.of([Tensor()], program="b").kind
