"""Whether a loss lets its rows be moved between microbatches, found out by running it on a whole and on its parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from gradprune.errors import PlanError

Coupling = Literal["global", "microbatch", "coupled"]


def probe_normaliser(
    loss_fn: Callable[..., torch.Tensor],
    example_args: Mapping[str, Any] | Sequence[Any],
    *,
    wrt: str,
    rtol: float = 1e-4,
    fixed_width: bool = False,
) -> Coupling:
    """What happens to a row's gradient when other rows leave its microbatch, or bring padding; measured, not proved.

    ``global``: nothing. ``microbatch``: all gradients of a part are scaled by one number, a denominator that counts the
    microbatch: its rows, its tokens, or its width. ``coupled``: anything else.

    example_args: of `loss_fn`, by name or position. Tensors with the leading size of `wrt` are cut with it, all others
    passed whole. wrt: name of the floating point argument that depends on the model, at least 3 rows. rtol: relative to
    the largest gradient of a part. fixed_width: all microbatches are as wide as the example; otherwise what has the
    rows and columns of `wrt` is also tried at twice its width, zeros appended. Raises PlanError where the example has
    too little gradient to tell.
    """
    signature = inspect.signature(loss_fn)
    given = example_args if isinstance(example_args, Mapping) else signature.bind(*example_args).arguments
    if wrt not in given or not torch.is_tensor(given[wrt]) or not given[wrt].is_floating_point():
        raise PlanError(f"wrt={wrt!r} is no floating point tensor among the arguments: {', '.join(given)}")
    rows = len(given[wrt])
    if rows < 3:
        raise PlanError(f"{wrt} has {rows} rows: pass an example of at least 3, so that two unequal parts can be cut")
    whole = _gradient(loss_fn, given, wrt, slice(None))
    cut = rows // 3
    pairs = [(slice(0, cut), given), (slice(cut, rows), given)]
    if given[wrt].ndim > 1 and not fixed_width:
        pairs.append((slice(0, rows), _widen(given, wrt)))
    scales = []
    for part, args in pairs:
        alone, within = _gradient(loss_fn, args, wrt, part), whole[part]
        alone = alone[:, : within.shape[1]] if alone.ndim > 1 else alone
        if alone.abs().max() == 0 or within.abs().max() == 0:
            raise PlanError(
                f"rows {part.start} to {part.stop - 1} of the example have no gradient: pass advantages and a mask "
                "that are not zero there"
            )
        scale = _scale(alone, within, rtol)
        if scale is None:
            return "coupled"
        scales.append(scale)
    return "global" if all(abs(scale - 1) <= rtol for scale in scales) else "microbatch"


def _scale(alone: torch.Tensor, within: torch.Tensor, rtol: float) -> float | None:
    """The number that makes `within` of `alone`; None where there is none."""
    scale = float((alone * within).sum() / (alone * alone).sum())
    same = torch.allclose(within, scale * alone, rtol=0.0, atol=float(rtol * within.abs().max()))
    return scale if same else None


def _widen(given: Mapping[str, Any], wrt: str) -> dict[str, Any]:
    shape = given[wrt].shape[:2]
    return {
        name: torch.cat([value, torch.zeros_like(value)], 1)
        if torch.is_tensor(value) and value.shape[:2] == shape
        else value
        for name, value in given.items()
    }


def _gradient(loss_fn: Callable[..., torch.Tensor], given: Mapping[str, Any], wrt: str, part: slice) -> torch.Tensor:
    rows = len(given[wrt])
    args = {
        name: value[part] if torch.is_tensor(value) and value.ndim and len(value) == rows else value
        for name, value in given.items()
    }
    leaf = args[wrt].detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_fn(**{**args, wrt: leaf}), leaf)
    return gradient.double()
