"""Operators of elements at the same position."""

from __future__ import annotations

import math
from typing import Any

import torch

from gradprune.passes.rules.compare import _OVERLOADS as COMPARISONS
from gradprune.passes.rules.unary import FUNCTIONS
from tests.passes.builder import NUMBERS, Builder, aten
from tests.passes.catalogue.cases import case

BINARY = (
    "mul.Tensor div.Tensor maximum.default minimum.default fmax.default"
    " fmin.default remainder.Tensor fmod.Tensor xlogy.Tensor special_xlog1py.default atan2.default hypot.default"
    " copysign.Tensor heaviside.default logical_and.default logical_or.default logical_xor.default"
    " pow.Tensor_Tensor floor_divide.default"
)
WITH_NUMBER = (
    "add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar remainder.Scalar fmod.Scalar pow.Tensor_Scalar"
    " copysign.Scalar xlogy.Scalar_Other clamp_min.default clamp_max.default"
)


@case(*(f"aten.{name}" for name in BINARY.split()))
def binary(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    if b.random.random() < 0.1:
        y = x
    if b.random.random() < 0.1 and "heaviside" not in str(
        op
    ):  # a number of a wider dtype, which reads as inf or 0 in a narrower one
        y = b.call(aten.full.default, [], b.pick((1e39, 1e-50, -1e300, 0.0)), dtype=torch.float64)
    return b.call(op, x, y)


@case("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor")
def scaled_sum(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    return b.call(op, x, y, alpha=b.pick((1, 2, 0.1, -1, math.inf, 1e39)))


@case(*(f"aten.{name}" for name in WITH_NUMBER.split()))
def with_number(b: Builder, op: Any) -> Any:
    number = b.pick((*NUMBERS, math.inf)) if "pow" not in str(op) else b.pick((0, 1, 2, 3, -1, 0.5, -0.5, 1.0))
    return b.call(op, b.operand(), number)


@case(*COMPARISONS)
def comparison(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    if str(op).endswith("Scalar"):
        return b.call(op, x, b.pick((*NUMBERS, math.inf)))
    return b.call(op, x, x if b.random.random() < 0.2 else y)


@case("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.floor_divide.Scalar")
def rounded_division(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    divisor = y if "Tensor" in str(op) else b.pick((1, 2, -3, 0.5))
    mode = {"rounding_mode": b.pick(("floor", "trunc", None))} if "mode" in str(op) else {}
    return b.call(op, x, divisor, **mode)


@case("aten.pow.Scalar")
def number_to_power(b: Builder, op: Any) -> Any:
    return b.call(op, b.pick((0, 1, 2, 0.5)), b.operand())


@case("aten.addcmul.default", "aten.addcdiv.default")
def fused(b: Builder, op: Any) -> Any:
    return b.call(op, *b.broadcastable(3), value=b.pick((1, 2, 0.1, -1, math.inf, 1e39)))


@case("aten.lerp.Scalar", "aten.lerp.Tensor")
def interpolation(b: Builder, op: Any) -> Any:
    x, y, w = b.together(3)
    return b.call(op, x, y, w if "Tensor" in str(op) else b.pick((0.0, 0.3, 1.0)))


@case("aten.where.self")
def where(b: Builder, op: Any) -> Any:
    x, y = b.broadcastable(2)
    return b.call(op, b.boolean(b.pick((x, y))), x, y)


@case("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(b: Builder, op: Any) -> Any:
    x, y = b.together(2)
    number = b.pick((0.0, 1.0, -math.inf))
    return b.call(op, x, b.boolean(y), number if "Scalar" in str(op) else b.call(aten.full.default, [], number))


@case("aten.clamp.default", "aten.hardtanh.default")
def clamp(b: Builder, op: Any) -> Any:
    low, high = b.pick(((None, 1.2), (0, None), (0.8, 1.28), (-1, 1), (-0.5, 0), (1, None), (2, 1)))
    if "hardtanh" in str(op):
        return b.call(op, b.operand(), -1, 1)
    return b.call(op, b.operand(), low, high)


@case("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor")
def clamp_by_tensors(b: Builder, op: Any) -> Any:
    x, low, high = b.together(3)
    return b.call(op, x, low, high) if "clamp.Tensor" in str(op) else b.call(op, x, low)


@case(*(f"aten.{name}.default" for name in FUNCTIONS))
def unary(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand())


@case(
    "aten.neg.default",
    "aten.reciprocal.default",
    "aten.rsqrt.default",
    "aten.logical_not.default",
    "aten.isnan.default",
    "aten.isinf.default",
    "aten.isposinf.default",
    "aten.isneginf.default",
    "aten.isfinite.default",
    "aten.nan_to_num.default",
)
def one_operand(b: Builder, op: Any) -> Any:
    return b.call(op, b.operand())


@case("aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor", "aten.bitwise_xor.Tensor")
def bitwise(b: Builder, op: Any) -> Any:
    if b.random.random() < 0.3:
        return b.call(op, b.integer(), b.call(aten.full.default, [], b.pick((0, 1, 3)), dtype=torch.int64))
    x, y = b.together(2)
    return b.call(op, b.boolean(x), b.boolean(y))


@case("aten.bitwise_and.Scalar", "aten.bitwise_or.Scalar", "aten.bitwise_xor.Scalar")
def bitwise_with_number(b: Builder, op: Any) -> Any:
    return b.call(op, b.integer(), b.pick((0, 1, 6)))


@case("aten.bitwise_not.default")
def bitwise_not(b: Builder, op: Any) -> Any:
    return b.call(op, b.boolean() if b.random.random() < 0.5 else b.integer())


@case("aten._to_copy.default")
def convert(b: Builder, op: Any) -> Any:
    x = b.operand()
    dtype = b.pick((torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.int32, torch.uint8))
    if not dtype.is_floating_point and dtype != torch.bool:
        x = b.call(aten.clamp.default, b.call(aten.nan_to_num.default, x, 0.0, 3.0, -3.0), 0, 100)
    return b.call(op, x, dtype=dtype)
