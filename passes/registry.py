"""The table of transfer rules: operator name -> function. An operator has one rule; one without is unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

Rule = Callable[..., Any]
"""``rule(flow, node, *node.args, **node.kwargs)`` -> the node's Value, a tuple of them for several results, or None
for an operator of which nothing is claimed."""

_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by name, such as ``"aten.mul.Tensor"``. ValueError if one has a rule already."""

    def register(function: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"{name} has a rule already: {_RULES[name].__module__}.{_RULES[name].__name__}")
            _RULES[name] = function
        return function

    return register


def rules() -> Mapping[str, Rule]:
    return MappingProxyType(_RULES)


def rule_of(name: str) -> Rule | None:
    return _RULES.get(name)


def operator_name(target: Any) -> str:
    """``aten.mul.Tensor`` for an ATen overload, ``operator.add`` or ``math.sqrt`` for a Python function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module.removeprefix('_')}.{getattr(target, '__name__', target)}"
