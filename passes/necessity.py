"""Whether a side condition is necessary too: a gradient is not finite wherever the condition fails.

A condition is enough for a proof, and that is all the proof asks. To poison a gradient because it fails, without a
look at the gradient, it must be necessary: what is not finite must come down to a gradient by operators that hand it
on, or the value depends on nothing but factors of the hypothesis, whose product would then not be zero. A number beyond
`BOUND` counts as infinite here.

One operator on the way may wipe out rows and is seen through: the backward of ``nll_loss``, where labels are ignored.
The condition is then one on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch.fx

from gradprune.passes.domain import Need, NeedKind
from gradprune.passes.spreading import may_be_empty, spreading_operands

Node = torch.fx.Node
Users = Callable[[Node], Iterable[Node]]

_SPREADING_BACKWARD: Final = {
    "slice_backward": (0,),
    "select_backward": (0,),
    "_log_softmax_backward_data": (0,),
    "_softmax_backward_data": (0, 1),
    "tanh_backward": (0, 1),
    "sigmoid_backward": (0, 1),
    "slice_scatter": (1,),
    "select_scatter": (1,),
}
"""Operators of a backward whose result is not finite if any element of the operands at these places is not."""
_IN_PLACE_ORDER: Final = frozenset(
    "mul div add sub neg view _unsafe_view unsqueeze squeeze clone alias _to_copy".split()
)
"""Operators of a result with as many elements as the operand whose k-th element depends on its k-th."""
_TAME: Final = frozenset(
    "mul add sub neg abs sum mean clamp clamp_min maximum where eq ne gt ge lt le bitwise_not logical_not full"
    " scalar_tensor view _unsafe_view unsqueeze squeeze expand permute transpose t slice select clone alias detach"
    " _to_copy".split()
)
"""Operators whose result is finite if their operands are, but for numbers too large to occur in a mask."""
_NLL: Final = frozenset(["nll_loss_backward", "nll_loss2d_backward"])


class Necessary(NamedTuple):
    """exact: the condition is necessary. ignoring: for rows whose label is not ignored by the call of this index."""

    exact: bool
    ignoring: int | None = None


class Necessity:
    """Decides for needs of one joint graph. gradients: nodes that give gradients. given: inputs that are factors."""

    def __init__(self, gradients: Iterable[Node], given: Iterable[Node]) -> None:
        self._gradients, self._given = frozenset(gradients), frozenset(given)

    def of(self, need: Need, copies: Iterable[Node]) -> Necessary:
        """copies: nodes that compute the value of `need` again."""
        nodes = [need.node, *copies]
        by_factors = need.kind in ("finite", "notnan", "bounded") and self._depends_on_factors(need.node)
        if by_factors or any(self._arrives(_hit(need.kind, node)) for node in nodes):
            return Necessary(True)
        for node in nodes:
            for nll in self._in_order(node, need.kind):
                call = _forward_of(nll)
                if call is not None and self._arrives([nll]):
                    return Necessary(True, call)
        return Necessary(False)

    def _depends_on_factors(self, node: Node) -> bool:
        """Whether `node` is finite if the factors are: otherwise their product is NaN, and not zero."""
        sources = _closure([node], lambda node: node.all_input_nodes)
        inputs = {source for source in sources if source.op == "placeholder"}
        return bool(inputs) and inputs <= self._given and all(_name(node) in _TAME for node in sources - inputs)

    def _arrives(self, start: Iterable[Node]) -> bool:
        """Whether what is not finite in the result of any of `start` comes down to a gradient."""
        return not self._gradients.isdisjoint(_closure(start, _receivers))

    def _in_order(self, node: Node, kind: NeedKind) -> list[Node]:
        """Backwards of nll_loss to whose cotangent each element of `node` that fails comes at its own place."""
        count = _count(node)

        def following(reached: Node) -> Iterable[Node]:
            return (
                user
                for user in (_hit(kind, node) if reached is node else _receivers(reached))
                if user.target._opname in _IN_PLACE_ORDER and _count(user) == count  # type: ignore[union-attr]
            )

        ends = (user for reached in _closure([node], following) for user in reached.users)
        return [user for user in ends if _name(user) in _NLL and user.args[4] == 0 and _count(user.args[0]) == count]


def _forward_of(nll: Node) -> int | None:
    """The torch call that computed what `nll` differentiates: the one that picks from its log-probabilities."""
    log_probs = nll.args[1]
    assert isinstance(log_probs, Node)
    calls = {user.meta["call"] for user in log_probs.users if "call" in user.meta and _name(user) == "gather"}
    return calls.pop() if len(calls) == 1 else None


def _closure(start: Iterable[Node], following: Users) -> set[Node]:
    seen = set(start)
    queue = list(seen)
    while queue:
        new = set(following(queue.pop())) - seen
        seen |= new
        queue += new
    return seen


def _name(node: Node) -> str:
    return getattr(node.target, "_opname", "")


def _count(node: Any) -> Any:
    """The number of elements, as an expression that can be compared."""
    value = node.meta["val"]
    count = value.numel() if isinstance(value, torch.Tensor) else None
    return getattr(getattr(count, "node", None), "expr", count)


def _receivers(node: Node) -> list[Node]:
    """The users of `node` whose result is not finite if any element of it is not."""
    return [user for user in node.users if node in _handing_on(user)]


def _hit(kind: NeedKind, node: Node) -> list[Node]:
    """The users of `node` whose result is not finite if any element of it fails a need of `kind`."""
    return [user for user in node.users if node in _hit_operands(kind, user)]


def _hit_operands(kind: NeedKind, user: Node) -> list[Node]:
    if _name(user) == "div" and kind in ("nonzero", "notnan"):
        return _nodes(user.args[1:2]) + (_handing_on(user) if kind == "notnan" else [])
    if _name(user) == "_log_softmax_backward_data" and kind == "notnan":
        return _nodes(user.args[:2])  # but of an infinite log-probability, the exponential is zero
    return [] if kind == "nonzero" else _handing_on(user)


def _handing_on(node: Node) -> list[Node]:
    """The operands of `node` that make its result not finite if any element of them is not."""
    name = _name(node)
    if name in _NLL:
        return []  # where labels are ignored, its result is zero
    if name == "scatter_add":  # elements beyond the index are left out
        return _nodes(node.args[3:4]) if _count(node.args[2]) == _count(node.args[3]) else []
    if name == "constant_pad_nd":
        sizes: Any = node.args[1]
        return _nodes(node.args[:1]) if all(isinstance(size, int) and size >= 0 for size in sizes) else []
    if name == "index_put" and len(node.args) > 3 and node.args[3] is True:
        return _nodes(node.args[2:3])
    places = _SPREADING_BACKWARD.get(name)
    if places is None:
        return spreading_operands(node)
    return [] if may_be_empty(node) else _nodes(node.args[place] for place in places)


def _nodes(operands: Iterable[Any]) -> list[Node]:
    return [operand for operand in operands if isinstance(operand, Node)]
