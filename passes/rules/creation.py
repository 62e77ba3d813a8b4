"""Tensors made from nothing but numbers and shapes, and random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradprune.passes.affine import groups_of
from gradprune.passes.domain import Value, unknown
from gradprune.passes.flow import Flow, Node
from gradprune.passes.registry import rule
from gradprune.passes.transfer import dtype_of, operands, pointwise


def _filled(flow: Flow, node: Node, number: Any) -> Value:
    (value,) = operands(flow, dtype_of(node), number)
    return replace(value, dims=groups_of(node.meta["val"].shape), facts={}) if not value.dims else _unknown(node)


def _unknown(node: Node) -> Value:
    return unknown(groups_of(node.meta["val"].shape), dtype_of(node))


@rule("aten.full.default", "aten.full_like.default", "aten.fill.Scalar", "aten.fill.Tensor")
def full(flow: Flow, node: Node, _: Any, number: Any, **__: Any) -> Value:
    return _filled(flow, node, number)


@rule("aten.new_full.default")
def new_full(flow: Flow, node: Node, _: Any, __: Any, number: Any, **___: Any) -> Value:
    return _filled(flow, node, number)


@rule("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default", "aten.zero.default")
def zeros(flow: Flow, node: Node, *_: Any, **__: Any) -> Value:
    return _filled(flow, node, 0)


@rule("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def ones(flow: Flow, node: Node, *_: Any, **__: Any) -> Value:
    return _filled(flow, node, 1)


@rule("aten.scalar_tensor.default")
def scalar_tensor(flow: Flow, node: Node, number: Any, **_: Any) -> Value:
    return _filled(flow, node, number)


@rule("aten.rand.default", "aten.rand_like.default", "aten.bernoulli.default", "aten.bernoulli.p")
def between_zero_and_one(flow: Flow, node: Node, *_: Any, **__: Any) -> Value:
    return replace(_unknown(node), bounds=(0.0, 1.0), notnan=True)


@rule("aten.eye.default", "aten.eye.m")
def eye(flow: Flow, node: Node, *_: Any, **__: Any) -> Value:
    return replace(_unknown(node), bounds=(0.0, 1.0), notnan=True)


@rule("aten.native_dropout.default")
def dropout(flow: Flow, node: Node, a: Any, *_: Any) -> tuple[Value, None]:
    """The operand's element, scaled, or zero."""
    (x,) = operands(flow, dtype_of(node), a)
    return pointwise(node, [x], lambda p: p if p is not None and p.value == 0 else None), None
