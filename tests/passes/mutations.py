# ruff: noqa: E501
"""Guards of the analysis, each with the text that drops or negates it: the tests must notice every one."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    before: str
    after: str


MUTATIONS = (
    # arithmetic
    Mutation("rules/arithmetic.py", "if p is not None and p.value == 0 and finite_b is not None:\n            return Known(0, p.needs | finite_b)", "if p is not None and p.value == 0:\n            return Known(0, p.needs)"),
    Mutation("rules/arithmetic.py", "return Known(value, p.needs | q.needs) if not math.isnan(value) else None", "return Known(0 if math.isnan(value) else value, p.needs | q.needs)"),
    Mutation("rules/arithmetic.py", "if p is not None and p.value == 0 and nonzero is not None:\n            return Known(0, p.needs | nonzero)", "if p is not None and p.value == 0:\n            return Known(0, p.needs)"),
    Mutation("rules/arithmetic.py", "if p is None or q is None or not finite:", "if p is None or q is None:"),
    Mutation("rules/arithmetic.py", "if q.value == 0 or (math.isinf(p.value) and math.isinf(q.value)):\n                return None", "if q.value == 0:\n                return Known(0, p.needs)"),
    Mutation("rules/arithmetic.py", "nan = (_may_be_zero(x) and _may_be_infinite(y)) or (_may_be_zero(y) and _may_be_infinite(x))", "nan = False"),
    Mutation("rules/arithmetic.py", "notnan=x.notnan and y.notnan and not opposite and scale is not None", "notnan=x.notnan and y.notnan"),
    Mutation("rules/arithmetic.py", "if dividend is None or notnan is None or _may_be_zero(divisor):", "if dividend is None or notnan is None:"),
    Mutation("rules/arithmetic.py", "bounds = (max(bounds[0], 0.0), bounds[1])", "bounds = (0.0, 1.0)"),
    Mutation("rules/arithmetic.py", "divisor = q.needs if q is not None and q.value != 0 else nonzero if q is None else None", "divisor = frozenset()"),
    Mutation("rules/arithmetic.py", "clean = q.needs if q is not None else notnan", "clean = frozenset()"),
    Mutation("rules/arithmetic.py", "if p is None or q is None or p.value != 0 or q.value != 0 or finite is None:", "if p is None or p.value != 0 or q is None or finite is None:"),
    # choice
    Mutation("rules/choice.py", "if p is not None and q is not None and p.value == q.value:", "if p is not None and q is not None:"),
    Mutation("rules/choice.py", "picked = None if condition is None else (p if condition.value else q)", "picked = None if condition is None else (q if condition.value else p)"),
    Mutation("rules/choice.py", "return other.bounds[1] <= value if larger else other.bounds[0] >= value", "return True"),
    Mutation("rules/choice.py", "return Known(p.value, p.needs | notnan_y)", "return Known(p.value, p.needs)"),
    Mutation("rules/choice.py", "notnan = notnan | limit_notnan if notnan is not None and limit_notnan is not None else None", "pass"),
    Mutation("rules/choice.py", "bounds=intervals.joined(x.bounds, y.bounds),\n        notnan=x.notnan and y.notnan,\n        reach=_larger(*reaches)", "bounds=x.bounds,\n        notnan=x.notnan,\n        reach=_larger(*reaches)"),
    Mutation("rules/choice.py", "lambda p: p if p is not None and math.isfinite(p.value) else None", "lambda p: p"),
    # comparison and logic
    Mutation("rules/compare.py", "return Known(name != \"ne\", notnan) if notnan is not None else None", "return Known(name != \"ne\")"),
    Mutation("rules/compare.py", "(a.high < b.low, a.low >= b.high) if name == \"lt\"", "(a.high <= b.low, a.low >= b.high) if name == \"lt\""),
    Mutation("rules/compare.py", "return Known(True, clean) if true and clean is not None else None", "return Known(True, needs) if true else None"),
    Mutation("rules/compare.py", "options = [Known(False, k.needs) for k in (p, q) if k is not None and not k.value]", "options = [Known(False, k.needs) for k in (p, q) if k is not None]"),
    Mutation("rules/compare.py", "options = [Known(True, k.needs) for k in (p, q) if k is not None and k.value]", "options = [Known(True, k.needs) for k in (p, q) if k is not None]"),
    Mutation("rules/compare.py", "clean = Known(False) if x.notnan else None", "clean = Known(False)"),
    # unary, powers
    Mutation("rules/unary.py", "\"exp\": Elementwise({0: 1,", "\"exp\": Elementwise({0: 0,"),
    Mutation("rules/unary.py", "notnan=x.notnan and inside,", "notnan=x.notnan,"),
    Mutation("rules/unary.py", "slack = 0.0 if name in _EXACT_BOUNDS else 2.0**-8", "slack = -(2.0**-4)"),
    Mutation("rules/powers.py", "return 0 if q > 0 else None", "return 0"),
    Mutation("rules/powers.py", "if q is not None and q.value == 0:\n        return Known(1, q.needs)", "if q is not None and q.value == 0:\n        return Known(0, q.needs)"),
    Mutation("rules/powers.py", "bounds=(0.0, largest) if positive else ANY,", "bounds=(0.0, INF),"),
    Mutation("rules/powers.py", "return Known(0, p.needs | q.needs) if q.value > 0 else None", "return Known(0, p.needs | q.needs)"),
    Mutation("rules/powers.py", "return Known(q.value, p.needs | q.needs) if q is not None else None", "return Known(0, p.needs)"),
    # conversions, creation
    Mutation("rules/numbers.py", "if math.isinf(value):\n            return None", "if math.isinf(value):\n            value = 0"),
    Mutation("rules/numbers.py", "if not x.notnan or x.bounds[0] < low or x.bounds[1] > high:", "if x.bounds[0] < low or x.bounds[1] > high:"),
    Mutation("rules/creation.py", "lambda p: p if p is not None and p.value == 0 else None", "lambda p: p"),
    # positions
    Mutation("rules/views.py", "dims[first], dims[second] = dims[second], dims[first]", "pass"),
    Mutation("rules/views.py", "affine(plus(group[0].size, -1), [(atom, -1)])", "affine(0, [(atom, 1)])"),
    Mutation("rules/views.py", "affine(0, [(high, inner), (low, 1)])", "affine(0, [(high, rest), (low, 1)])"),
    Mutation("rules/views.py", "return remapped(value, dims, forgotten(value.dims[place] for place in places))", "return remapped(value, value.dims)"),
    Mutation("rules/slices.py", "return min(max(start + size if start < 0 else start, 0), size)", "return max(start, 0)"),
    Mutation("rules/slices.py", "affine(first, [(atom, step) for atom in new])", "affine(first, [(atom, 1) for atom in new])"),
    Mutation("rules/slices.py", "affine(times(-1, offset), [(target[0], 1)])", "affine(0, [(target[0], 1)])"),
    Mutation("rules/slices.py", "mixed(flow, node, [(value, mapping), (filler, {})])", "mixed(flow, node, [(value, mapping)])"),
    Mutation("rules/slices.py", "const = value.const if value.is_zero() else None", "const = value.const"),
    # positions that are data
    Mutation("rules/gathers.py", "mapping.update(forgotten([group]))", "mapping.update({})"),
    Mutation("rules/gathers.py", "tuple(out), forgotten(dims[place] for place in gone)", "tuple(out), {}"),
    Mutation("rules/gathers.py", "front = gone[0] if adjacent else 0", "front = gone[0] if gone else 0"),
    Mutation("rules/gathers.py", "if len(indices) != 1 or indices[0] is None or indices[0].meta[\"val\"].dtype != torch.bool:\n        return None", "if indices[0] is None or indices[0].meta[\"val\"].dtype != torch.bool:\n        return Known(0)"),
    Mutation("rules/scatters.py", "new = Known(old.value + new.value, old.needs | new.needs) if old is not None and new is not None else None", "pass"),
    Mutation("rules/scatters.py", "zero = result.const if result.is_zero() else None", "zero = result.const"),
    Mutation("rules/scatters.py", "facts=only_zeros(result.facts), bounds=ANY", "facts=result.facts, bounds=result.bounds"),
    Mutation("flow.py", "torch.Tag.nondeterministic_seeded not in target.tags", "target.tags is not None"),
    Mutation("affine.py", "key = (at, stride, atom.size, extent)", "key = ((), stride, atom.size, extent)"),
    Mutation("rules/slices.py", "affine(plus(index.offset, times(-1, offset)), [(group[0], 1)])", "affine(index.offset, [(group[0], 1)])"),
    Mutation("rules/slices.py", "leading, count = 0 if first == 0 else quotient(first, width), quotient(length, width)", "leading, count = 0, quotient(length, width)"),
    # reductions, orders, products
    Mutation("rules/reductions.py", "result = reduced(value, dim, keepdim, node, _zero)\n    one_sign", "result = reduced(value, dim, keepdim, node, _any_number)\n    one_sign"),
    Mutation("rules/reductions.py", "read = remapped(value, out, forgotten(value.dims[place] for place in places))", "read = remapped(value, out)"),
    Mutation("rules/reductions.py", "notnan=value.notnan and (one_sign or _sum_fits(value, count[1])),", "notnan=value.notnan,"),
    Mutation("rules/reductions.py", "least = (low if count[0] >= 1 else 0.0) if low >= 0 else 2 * most * low", "least = low"),
    Mutation("rules/reductions.py", "if nonempty is None:\n        return replace(reduced(value, dim, keepdim, node, lambda _: False), broken=True)", "if nonempty is None:\n        nonempty = frozenset()"),
    Mutation("rules/reductions.py", "if high <= correction:\n        return replace(reduced(value, dim, keepdim, node, lambda _: False), broken=True)\n    enough = low > correction", "enough = True"),
    Mutation("rules/reductions.py", "node, lambda number: number != 0), broken=False)", "node, lambda number: True), broken=False)"),
    Mutation("rules/orders.py", "(lambda number: True) if several else (lambda number: number == 0)", "(lambda number: True)"),
    Mutation("rules/orders.py", "read = remapped(value, value.dims, forgotten(value.dims[place : place + 1]))", "read = value"),
    Mutation("rules/matmul.py", "const = Known(0, value.const.needs | finite)", "const = Known(0, value.const.needs)"),
    Mutation("rules/matmul.py", "facts |= _zeros(moved_facts(value.facts, mapping), finite, facts)", "facts |= _zeros(moved_facts(value.facts, mapping), frozenset(), facts)"),
    Mutation("rules/matmul.py", "if known.value == 0 and key not in before", "if key not in before"),
    Mutation("rules/matmul.py", "needs = needs | value.const.needs if needs is not None and value.is_zero() and value.const else None", "pass"),
    # backward
    Mutation("rules/backward.py", "if const is None or const.value != 0:\n            return None", "if const is None:\n            return None"),
    Mutation("rules/backward.py", "if finite is None:\n            return None\n        needs |= finite", "pass"),
    Mutation("rules/backward.py", "return _saved_finite(flow, node, saved) if small else flow.condition(\"finite\", node)", "return _saved_finite(flow, node, saved)"),
    Mutation("rules/backward.py", "return _elementwise(flow, node, _saved_finite)", "return _elementwise(flow, node, lambda *_: NO_NEEDS)"),
    Mutation("rules/backward.py", "needs = flow.notnan(output) if \"log\" in str(node.target) else flow.finite(output)", "needs = NO_NEEDS"),
    Mutation("rules/backward.py", "divisor = flow.nonzero(total) if reduction == 1 else NO_NEEDS", "divisor = NO_NEEDS"),
    # the frame
    Mutation("transfer.py", "if any(group and not _same_extent(group, longest) for group in groups):", "if False:"),
    Mutation("flow.py", "if any(value != values[0] for value in values):\n                continue", "pass"),
    Mutation("flow.py", "if axis in indices and (index is EVERY or index != indices[axis]):\n                    return None", "pass"),
    Mutation("flow.py", "if _narrows(value.dtype, dtype):\n            return NO_NEEDS if", "if False:\n            return NO_NEEDS if"),
    Mutation("flow.py", "if axis in indices and (index is EVERY or index != indices[axis]):", "if axis in indices and index is not EVERY and index != indices[axis]:"),
    Mutation("domain.py", "return Known(a.value, a.needs | b.needs) if a is not None and b is not None and a.value == b.value else None", "return a or b"),
    Mutation("domain.py", "return value if (mantissa * 256).is_integer() and -10 <= exponent <= 15 else None", "return value"),
    Mutation("affine.py", "if target is None:\n            return EVERY", "if target is None:\n            continue"),
    Mutation("affine.py", "terms[inner] = plus(terms.get(inner, 0), times(coefficient, factor))", "terms[inner] = plus(terms.get(inner, 0), factor)"),
    Mutation("intervals.py", "return 0.0 if x == 0 or y == 0 else x * y", "return x * y if x < 1e300 else 0.0"),
    Mutation("intervals.py", "if low <= 0 <= high:\n        return ANY", "if low < 0 < high:\n        return ANY\n    if low == 0 or high == 0:\n        return (min(a[0], 0.0), math.inf)"),
    Mutation("intervals.py", "return math.inf if value > largest else max(value, -largest)", "return value"),
)  # fmt: skip
