"""What the CPU knows of a rollout: factor tensors -> which rows are exactly zero, and which groups only nearly are.

A *row* is an entry of a tensor's leading dimension: a sample, or a token where samples are packed without `lengths`.
Torch tensors are read, torch is not imported. Nothing here moves data between devices.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from gradprune.errors import PlanError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class UniformGroup:
    """A group whose rows all got one reward, but whose advantages are not zero: rounding residue.

    residue: the largest absolute advantage in the group. snapped: the plan takes the group's advantages as exact zeros.
    """

    group: int | str
    rows: tuple[int, ...]
    residue: float
    snapped: bool = False

    def __str__(self) -> str:
        return f"group {self.group}: {len(self.rows)} equal rewards, advantage {self.residue:.3g} instead of 0"


def read_array(name: str, value: Any) -> Array:
    """A numeric NumPy view or copy of a CPU tensor, array or nested list; at least one dimension.

    Raises PlanError for a tensor on another device (never a hidden synchronisation), ragged lists and non-numbers.
    """
    if hasattr(value, "detach") and hasattr(value, "device"):
        if value.device.type != "cpu":
            raise PlanError(
                f"{name} is on {value.device}: pass {name}.cpu(); a plan is made from host memory and never "
                "synchronises with a device by itself"
            )
        value = value.detach()
        if value.is_floating_point() and value.itemsize <= 2:
            value = value.float()  # exact, and NumPy has no bfloat16
        value = value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise PlanError(f"{name} is ragged: pass a tensor or an array of one shape") from error
    if array.dtype.kind not in "biuf":
        raise PlanError(f"{name} holds {array.dtype}, not numbers: pass a tensor or an array of numbers")
    if array.ndim == 0:
        raise PlanError(f"{name} is a scalar: pass one value a row, at least")
    return array


LARGEST = 2**31 - 1
"""Of a length and of a count: sums over a rollout stay exact in float64."""


def read_whole(name: str, value: Any, most: int = LARGEST) -> int:
    """A whole number from 1 to `most`, as an int: Python's, NumPy's, a tensor's, or a float without a fraction.

    Raises PlanError for anything else.
    """
    try:
        number = int(value) if isinstance(value, (float, np.floating)) else operator.index(value)
        fits = not isinstance(value, bool) and number == value and 1 <= number <= most
    except (TypeError, ValueError, OverflowError):  # no number, NaN, infinity
        fits = False
    if not fits:
        raise PlanError(f"{name} is {value!r}: pass a whole number, at least 1 and at most {most}")
    return number


def read_lengths(lengths: Any) -> npt.NDArray[np.int64]:
    """Lengths in tokens, int64 [R]. Raises PlanError naming the first that is no whole number from 1 to `LARGEST`."""
    array = read_array("lengths", lengths)
    if array.ndim != 1 or array.size == 0:
        raise PlanError(f"lengths has shape {list(array.shape)}: pass one length a sequence, at least one")
    wrong = ~((array >= 1) & (array <= LARGEST) & (array == np.floor(array)))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise PlanError(
            f"lengths[{row}] is {array[row]}: pass whole numbers of tokens, at least 1 and at most {LARGEST}"
        )
    return array.astype(np.int64)


def zero_rows(factors: Mapping[str, Any], lengths: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.bool_]:
    """bool [R]: at every position of the row at least one factor is exactly zero.

    Factors are aligned at their leading dimensions: ``[R]`` against ``[R, T]`` speaks of all of a row's tokens. With
    `lengths` [R], factors may also be packed, ``[sum(lengths), ...]``. Raises PlanError for factors that do not fit
    each other and for NaN or infinite entries (0 * inf is not 0), with the row.
    """
    arrays = {name: read_array(name, value) for name, value in factors.items()}
    if not arrays:
        raise PlanError("no factor was passed: name at least one tensor that is zero where the loss has no gradient")
    for name, array in arrays.items():
        _check_finite(name, array, lengths)
    zeros = {name: array == 0 for name, array in arrays.items()}
    packed = lengths is not None and any(len(zero) != len(lengths) for zero in zeros.values())
    if lengths is not None:
        zeros = {name: _fit_lengths(name, zero, lengths, packed) for name, zero in zeros.items()}
    rows = _all_positions(zeros)
    if packed:
        assert lengths is not None
        rows = np.logical_and.reduceat(rows, np.cumsum(lengths) - lengths)
    return rows


def _all_positions(zeros: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
    rank = max(zero.ndim for zero in zeros.values())
    for (one, first), (two, second) in combinations(zeros.items(), 2):
        for dim, (size, other) in enumerate(zip(first.shape, second.shape)):
            if size != other and (dim == 0 or 1 not in (size, other)):
                raise PlanError(
                    f"{one} has shape {list(first.shape)} and {two} {list(second.shape)}: factors of one product must "
                    f"agree in their leading dimensions, and dimension {dim} is {size} against {other}"
                )
    product = np.zeros((1,) * rank, dtype=np.bool_)
    for zero in zeros.values():
        product = product | zero.reshape(zero.shape + (1,) * (rank - zero.ndim))
    return np.asarray(product.reshape(len(product), -1).all(axis=1))


def _fit_lengths(name: str, zero: Array, lengths: npt.NDArray[np.int64], packed: bool) -> Array:
    total = int(lengths.sum())
    if len(zero) == len(lengths):
        return np.repeat(zero, lengths, axis=0) if packed else zero
    if len(zero) == total:
        return zero
    raise PlanError(
        f"{name} has {len(zero)} rows, lengths has {len(lengths)} and sums to {total}: pass {name} with one row a "
        "sequence, or packed with one row a token"
    )


def _check_finite(name: str, array: Array, lengths: npt.NDArray[np.int64] | None) -> None:
    if array.dtype.kind != "f":
        return
    finite = np.isfinite(array)
    if finite.all():
        return
    where = tuple(int(index) for index in np.argwhere(~finite)[0])
    row = where[0]
    if lengths is not None and len(array) != len(lengths):
        row = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
    raise PlanError(
        f"{name}{list(where)} is {array[where]} (row {row}): a non-finite factor makes the whole gradient non-finite; "
        "mend the reward or advantage of this row first"
    )


def read_groups(rows: int, groups: int | Any | None) -> tuple[npt.NDArray[np.int64], tuple[int | str, ...]] | None:
    """Group of each row, int64 [R] numbered from 0 by first appearance, and the groups' ids; None for None.

    groups: an int (rows per group, consecutive) or one id a row (numbers or strings). Raises PlanError for ragged
    groups.
    """
    if groups is None:
        return None
    if isinstance(groups, (int, np.integer)):
        size = int(groups)
        if size < 1 or rows % size:
            raise PlanError(
                f"advantages has {rows} rows, group_size is {size}: pass whole groups, "
                f"or group_size={nearest_divisor(rows, size)}"
            )
        return np.arange(rows) // size, tuple(range(rows // size))
    ids = np.asarray(groups if not hasattr(groups, "detach") else read_array("groups", groups))
    if ids.shape != (rows,):
        raise PlanError(f"advantages has {rows} rows, groups has shape {list(ids.shape)}: pass one group id a row")
    if ids.dtype.kind in "fO":
        missing = next((row for row, name in enumerate(ids.tolist()) if name is None or name != name), None)
        if missing is not None:
            raise PlanError(f"groups[{missing}] is {ids[missing]}: pass an id, a number or a string, for every row")
    names, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place[inverse].astype(np.int64), tuple(names[order].tolist())


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the larger of two."""
    divisors = [d for low in range(1, int(number**0.5) + 1) if number % low == 0 for d in (low, number // low)]
    return min(divisors or [1], key=lambda d: (abs(d - wanted), -d))


def uniform_groups(
    advantages: Any, groups: tuple[npt.NDArray[np.int64], tuple[int | str, ...]], rewards: Any = None
) -> tuple[UniformGroup, ...]:
    """Groups of equal rewards whose advantages are not all zero, in the order of the groups.

    advantages: [R] or [R, T]. With `rewards` [R] a group counts as uniform when its rewards are equal; without, when
    all its non-zero advantages are one and the same number, which a mean over the group forbids: right for advantages
    centred per group, and for no others. Groups of one row are left out.
    """
    values = read_array("advantages", advantages)
    signed = values.reshape(len(values), -1).astype(np.float64)
    size_of_row = np.abs(signed).max(axis=1)
    lowest, highest = (
        np.where(signed == 0, np.inf, signed).min(axis=1),
        np.where(signed == 0, -np.inf, signed).max(axis=1),
    )
    group, names = groups
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(names)))
    sizes = np.diff(np.append(starts, len(order)))
    residue = np.maximum.reduceat(size_of_row[order], starts)
    if rewards is not None:
        reward = read_array("rewards", rewards)
        if reward.shape != group.shape:
            raise PlanError(f"rewards has shape {list(reward.shape)}: pass one reward a row, {len(group)} in all")
        if not np.isfinite(reward).all():
            row = int(np.argmin(np.isfinite(reward)))
            raise PlanError(f"rewards[{row}] is {reward[row]}: pass finite rewards, or none")
        same = np.maximum.reduceat(reward[order], starts) == np.minimum.reduceat(reward[order], starts)
    else:
        nonzero = np.logical_and.reduceat(size_of_row[order] > 0, starts)
        same = nonzero & (np.maximum.reduceat(highest[order], starts) == np.minimum.reduceat(lowest[order], starts))
    found = np.flatnonzero(same & (residue > 0) & (sizes > 1))
    return tuple(
        UniformGroup(names[g], tuple(order[starts[g] : starts[g] + sizes[g]].tolist()), float(residue[g]))
        for g in found
    )


def _read_rows(name: str, part: Any) -> npt.NDArray[np.int64]:
    rows = np.asarray(part).reshape(-1)
    if rows.size and rows.dtype.kind not in "iu":
        raise PlanError(f"{name} holds {rows.dtype}, not row numbers: pass whole numbers")
    return rows.astype(np.int64)


def split_rows(rows: int, microbatches: int | Sequence[Any]) -> list[npt.NDArray[np.int64]]:
    """How `rows` rows fall into microbatches: index arrays, one a microbatch.

    microbatches: an int (rows a microbatch, consecutive), a sequence of ints (rows of each microbatch, consecutive), or
    a sequence of index sequences. Raises PlanError unless every row falls into exactly one microbatch.
    """
    if isinstance(microbatches, (int, float)) or getattr(microbatches, "ndim", 1) == 0:
        size = read_whole("microbatches", microbatches)
        if rows % size:
            raise PlanError(
                f"advantages has {rows} rows, microbatches of {size} rows do not divide them: pass "
                f"microbatches={nearest_divisor(rows, size)}, or the size of each as a list"
            )
        return list(np.arange(rows).reshape(-1, size))
    parts = list(microbatches)
    if parts and all(isinstance(part, (int, np.integer)) for part in parts):
        sizes = np.asarray(parts, dtype=np.int64)
        if (sizes < 0).any() or sizes.sum() != rows:
            raise PlanError(
                f"the sizes in microbatches sum to {sizes.sum()}, advantages has {rows} rows: pass sizes that sum to "
                f"{rows}"
            )
        return np.split(np.arange(rows), np.cumsum(sizes)[:-1])
    indices = [_read_rows(f"microbatches[{k}]", part) for k, part in enumerate(parts)]
    seen = np.concatenate([np.empty(0, dtype=np.int64), *indices])
    for k, part in enumerate(indices):
        if ((part < 0) | (part >= rows)).any():
            row = int(part[(part < 0) | (part >= rows)][0])
            raise PlanError(f"microbatches[{k}] names row {row}, advantages has {rows} rows: pass rows from 0 on")
    counts = np.bincount(seen, minlength=rows)
    if (counts != 1).any():
        row = int(np.argmax(counts != 1))
        raise PlanError(
            f"row {row} of advantages is in {counts[row]} microbatches: put every row into exactly one, and make the "
            "plan from the rows of this rank only"
        )
    return indices
