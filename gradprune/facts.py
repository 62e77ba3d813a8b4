"""The words that the parts of gradprune share: hypotheses, verdicts, reasons. Frozen, comparable, JSON-able data.

Nothing here imports torch: a verdict can be read, stored and compared without it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gradprune.errors import PruneError


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code. `text` is the stripped source text, empty where it cannot be read."""

    file: str
    line: int
    text: str = ""
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.text else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Hypothesis:
    """At every position at least one of `factors` is exactly zero.

    A factor is the name of a tensor: a parameter of the loss, or a key or attribute of the batch (dots descend:
    ``"meta.advantages"``). Factors of different rank are aligned at their *leading* dimensions, as GRPO losses do it:
    ``advantages [R]`` against ``mask [R, T]`` means advantages of row r at each of its tokens.
    """

    factors: tuple[str, ...]

    @classmethod
    def parse(cls, zero: str | Hypothesis) -> Hypothesis:
        """``"adv * mask"`` -> ``Hypothesis(("adv", "mask"))``. Raises PruneError on anything else."""
        if isinstance(zero, Hypothesis):
            return zero
        if not isinstance(zero, str):
            raise PruneError(f"zero is a {type(zero).__name__}: pass a product of names, such as 'advantages * mask'")
        try:
            factors = _product(ast.parse(zero.strip(), mode="eval").body)
        except (SyntaxError, PruneError) as error:
            raise PruneError(
                f"zero={zero!r} is not a product of names: write names joined by '*', such as 'advantages * mask'"
            ) from error
        if len(set(factors)) != len(factors):
            raise PruneError(f"zero={zero!r} names a factor twice: name each factor once")
        return cls(tuple(factors))

    def __str__(self) -> str:
        return f"{' * '.join(self.factors)} == 0 at every position"


def _product(node: ast.expr) -> list[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product(node.left) + _product(node.right)
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [f"{_product(node.value)[0]}.{node.attr}"]
    raise PruneError(f"{ast.unparse(node)!r} is neither a name nor a product")


BOUND = 2.0**60
"""What a mask or weight would have to exceed for its product with a cotangent of 2**32 to overflow float32 or bfloat16,
with room for another factor."""


@dataclass(frozen=True)
class Condition:
    """A side condition of a proof: something that only run time can show.

    kind: what must hold of every element of the value computed at `where`: ``finite``, ``notnan``, ``nonzero``,
        ``bounded`` (at most `BOUND` in magnitude: an input whose product with a cotangent must not overflow), or
        ``nonempty`` (the tensor has elements).
    value: the operator that computed it, for a reader.
    call: index of the torch call in the traced program (`joint.CallStream`) in which the value is computed; None where
        it is an input, or cannot be told from others inside of its call, or is a value of the backward, which only
        running the loss's backward up to the boundary can show.
    inside: the ATen operator that computes the value on the way to the result of that call, and the only one of its
        name there (``"aten._log_softmax.default"`` in a cross entropy); "" where the value is the result itself.
    along: a dimension along which all elements are NaN if one is; None if there is none, or not known.
    exact: the gradient is not finite wherever the condition fails. Of the others that is not known: a condition is
        enough for the proof, and a mask behind it may wipe out what breaks it.
    ignoring: index of a cross entropy's call, on whose ignored labels it does not matter whether the condition holds:
        the value has an element for each label, in their order.
    """

    kind: Literal["finite", "notnan", "nonzero", "nonempty", "bounded"]
    value: str
    where: SourceLine | None = None
    call: int | None = None
    inside: str = ""
    along: int | None = None
    exact: bool = False
    ignoring: int | None = None

    def __str__(self) -> str:
        place = f"   at {self.where}" if self.where else ""
        return f"{self.kind}({self.value}){place}"


ReasonKind = Literal[
    "live-term", "lost-factor", "misaligned", "no-rule", "non-finite", "untraceable", "branch", "setting"
]


@dataclass(frozen=True)
class Reason:
    """Why a gradient is not proved zero.

    live-term: a term joins the loss that no factor multiplies. lost-factor: an operator after which a factor's zero
    is gone. misaligned: two factors meet at different positions. no-rule: an operator unknown to the analysis.
    non-finite: 0/0 or 0*inf under the hypothesis itself. untraceable: tracing stopped here. branch: the program takes
    more data-dependent paths than were proved. setting: a setting of the framework that adds gradient.
    """

    kind: ReasonKind
    message: str
    where: SourceLine | None = None

    def __str__(self) -> str:
        return f"{self.message}   at {self.where}" if self.where else self.message


@dataclass(frozen=True)
class Certificate:
    """The proof that under `hypothesis` every gradient with respect to `wrt` is exactly zero, given `conditions`.

    depth: ``loss`` (from the model's output on; sound while the model is linear in its cotangent, which the boundary
        check and audits watch) or ``step`` (the model included).
    per_row: also proved row by row: the gradient at a row is zero wherever a factor is zero all over that row,
        whatever the other rows hold. Needed before single sequences may be moved or dropped.
    paths: how many data-dependent paths the program has; each one is proved.
    operators: how many operators the joint graphs hold; `unknown`: those without a rule that stood in nobody's way.
    symbolic: sizes that the proof holds for in general, as ``"logp[0]"``; every other size is a constant of it.
    """

    hypothesis: Hypothesis
    wrt: tuple[str, ...]
    depth: Literal["loss", "step"] = "loss"
    per_row: bool = False
    conditions: tuple[Condition, ...] = ()
    paths: int = 1
    operators: int = 0
    unknown: tuple[str, ...] = ()
    symbolic: tuple[str, ...] = ()
    subject: str = ""
    seconds: float = field(default=0.0, compare=False)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        lines = [f"proved: every gradient of {self.subject or 'the loss'} is exactly zero"]
        lines += [f"  with respect to  {', '.join(self.wrt)}", f"  under            {self.hypothesis}"]
        rows = "the microbatch, and each row by itself" if self.per_row else "the microbatch as a whole only"
        lines += [f"  holds for        {rows}"]
        sizes = f"any size of {', '.join(self.symbolic)}" if self.symbolic else "these sizes only"
        lines += [f"  sizes            {sizes}"]
        boundary = "model included" if self.depth == "step" else "from the model's output on; checked at run time"
        lines += [f"  depth            {self.depth} ({boundary})"]
        lines += [f"  operators        {self.operators} on {self.paths} path{'s' * (self.paths != 1)}"]
        if self.unknown:
            lines += [f"  without a rule   {', '.join(self.unknown)} (nothing depends on them)"]
        lines += ["  side conditions  " + ("none" if not self.conditions else "")]
        lines += [f"    {condition}" for condition in self.conditions]
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        return {"proved": True, **asdict(self)}


@dataclass(frozen=True)
class Refusal:
    """No proof, and why: `reasons` name the source lines through which gradient still flows. Falsy."""

    hypothesis: Hypothesis
    wrt: tuple[str, ...]
    reasons: tuple[Reason, ...]
    subject: str = ""
    seconds: float = field(default=0.0, compare=False)

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        lines = [f"refused: gradient of {self.subject or 'the loss'} may flow although {self.hypothesis}"]
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])

    def to_json(self) -> dict[str, Any]:
        return {"proved": False, **asdict(self)}


Verdict = Certificate | Refusal


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    """The inverse of ``to_json``. Raises KeyError or TypeError on data of another shape."""
    data = dict(data)
    proved = data.pop("proved")
    data["hypothesis"] = Hypothesis(tuple(data["hypothesis"]["factors"]))
    data["wrt"] = tuple(data["wrt"])
    if not proved:
        return Refusal(**{**data, "reasons": tuple(Reason(**_lined(item)) for item in data["reasons"])})
    conditions = tuple(Condition(**_lined(item)) for item in data["conditions"])
    return Certificate(
        **{**data, "conditions": conditions, "unknown": tuple(data["unknown"]), "symbolic": tuple(data["symbolic"])}
    )


def _lined(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, "where": SourceLine(**item["where"]) if item["where"] else None}


@dataclass(frozen=True)
class Live:
    """This microbatch runs in full, for `reason`."""

    reason: str

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Dead:
    """This microbatch has no gradient and none is computed, for `reason`."""

    reason: str

    def __bool__(self) -> bool:
        return False
