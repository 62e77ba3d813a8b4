"""The table of transfer rules: operator name -> function. An operator has one rule; one without is unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

Rule = Callable[..., Any]
"""``rule(flow, node, *args, **kwargs)``, arguments as `arguments_of` gives them -> the node's Value, a tuple of Values
for several results, or None for an operator of which nothing is claimed."""

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


def arguments_of(node: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call: those that may be given by position always are, defaults between them filled in."""
    if not node.kwargs or not isinstance(node.target, torch._ops.OpOverload):
        return node.args, dict(node.kwargs)
    kwargs, args, gap = dict(node.kwargs), list(node.args), []
    for argument in node.target._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        if argument.name not in kwargs:
            gap.append(argument.default_value)
            continue
        args += [*gap, kwargs.pop(argument.name)]
        gap = []
    return tuple(args), kwargs


def operator_name(target: Any) -> str:
    """``aten.mul.Tensor`` for an ATen overload, ``operator.add`` or ``math.sqrt`` for a Python function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module.removeprefix('_')}.{getattr(target, '__name__', target)}"
