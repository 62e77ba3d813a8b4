"""FLOPs of shapes never counted, from shapes that were: exact linear algebra on the sizes of a microbatch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from gradprune.flops import Phases

REDUNDANT = 2
"""How many counted shapes must agree with the fit of the others before it is believed."""


@dataclass(frozen=True)
class BatchShape:
    """Key of a microbatch: the shapes of its tensors, and the real lengths of its sequences where the CPU knows them.

    program: whatever else tells programs apart, such as names of tensors or of models.
    Equal keys have equal FLOPs; unlike other hashable keys, this one lets `FlopMeter` conclude from one to another.
    """

    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] | None = None
    program: Hashable = None

    @classmethod
    def of(cls, leaves: Iterable[Any], lengths: Sequence[int] | None = None, program: Hashable = None) -> BatchShape:
        """From the leaves of a batch; what has no ``shape`` is passed over."""
        shapes = tuple(tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape"))
        return cls(shapes, None if lengths is None else tuple(lengths), program)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Batches of one kind run one program on tensors of the same ranks: their FLOPs are a function of the sizes."""
        return (*(len(shape) for shape in self.shapes), self.lengths is None, self.program)

    def features(self) -> tuple[int, ...]:
        """The sizes that FLOPs of a transformer are linear in: each size, elements, elements times length, and over
        real sequences their number, tokens and squared lengths."""
        values = [1]
        for shape in self.shapes:
            elements = prod(shape)
            values += [*shape, elements, elements * (shape[-1] if shape else 0)]
        if self.lengths is not None:
            values += [len(self.lengths), sum(self.lengths), sum(length * length for length in self.lengths)]
        return tuple(values)


class ShapeFit:
    """Costs as a linear function of features, kept as an echelon basis of the counted shapes, in whole numbers.

    Predicts only inside the span of what was counted, only after `REDUNDANT` counted shapes confirmed the fit, and
    never again once a counted shape contradicted it.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, list[int]]] = []
        self._confirmed = 0
        self._refuted = False

    def learn(self, features: Sequence[int], phases: Phases) -> None:
        """One counted shape and its FLOPs."""
        row, _ = self._reduce([*features, phases.forward, phases.backward, phases.recompute])
        pivot = next((i for i, value in enumerate(row[:-3]) if value), None)
        if pivot is not None:
            divisor = gcd(*row)
            self._rows.append((pivot, [value // divisor for value in row]))
        elif any(row):
            self._refuted = True
        else:
            self._confirmed += 1

    def predict(self, features: Sequence[int]) -> Phases | None:
        """FLOPs at `features`, or None where the counted shapes do not determine them."""
        if self._refuted or self._confirmed < REDUNDANT:
            return None
        row, scale = self._reduce([*features, 0, 0, 0])
        flops = [divmod(-value, scale) for value in row[-3:]]
        if any(row[:-3]) or any(rest or whole < 0 for whole, rest in flops):
            return None
        return Phases(*(whole for whole, _ in flops))

    def _reduce(self, row: list[int]) -> tuple[list[int], int]:
        """`scale` times the row, less multiples of the basis that clear every pivot."""
        scale = 1
        for pivot, base in self._rows:
            if row[pivot]:
                factor, unit = row[pivot], base[pivot]
                row = [value * unit - factor * other for value, other in zip(row, base)]
                scale *= unit
        return row, scale
