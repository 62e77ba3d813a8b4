"""Random losses: expressions over [R, T] tensors, reduced to a scalar, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Expression = Any  # a leaf's name, or (operator, operand, ...)
Tensors = dict[str, torch.Tensor]

LEAVES = ("x", "x", "x", "old", "a", "a", "m", "m", "am", "half", "one")


def _put(x: torch.Tensor, where: torch.Tensor, number: float) -> torch.Tensor:
    x = x.clone()
    x[where] = number
    return x


def _column(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 0] = x[:, -1] * 2
    return x


def _by_rows(x: torch.Tensor, e: Tensors) -> torch.Tensor:
    return torch.stack([x[i] * e["m"][i] / e["m"][i].sum().clamp(min=1) for i in range(x.shape[0])])


def _cross_entropy(x: torch.Tensor, e: Tensors) -> torch.Tensor:
    return F.cross_entropy(x, e["index"][:, 0], reduction="none")


def _restored(x: torch.Tensor, e: Tensors) -> torch.Tensor:
    chosen = e["m"].bool()
    return torch.zeros_like(x).masked_scatter(chosen, x[chosen] * 2)


UNARY: dict[str, Callable[[torch.Tensor, Tensors], torch.Tensor]] = {
    "exp": lambda x, e: x.clamp(max=20).exp(),
    "wild exp": lambda x, e: (x * 30).exp(),
    "neg": lambda x, e: -x,
    "abs": lambda x, e: x.abs(),
    "tanh": lambda x, e: x.tanh(),
    "sigmoid": lambda x, e: x.sigmoid(),
    "logsigmoid": lambda x, e: F.logsigmoid(x),
    "relu": lambda x, e: F.relu(x),
    "gelu": lambda x, e: F.gelu(x),
    "silu": lambda x, e: F.silu(x),
    "leaky": lambda x, e: F.leaky_relu(x),
    "square": lambda x, e: x**2,
    "cube": lambda x, e: x**3,
    "power zero": lambda x, e: x**0,
    "root": lambda x, e: x.abs().sqrt(),
    "root plus": lambda x, e: (x.abs() + 1e-6).sqrt(),
    "inverse root": lambda x, e: (x * x + 1e-8).rsqrt(),
    "log1p": lambda x, e: x.abs().log1p(),
    "expm1": lambda x, e: x.clamp(max=5).expm1(),
    "cos": lambda x, e: x.cos(),
    "sin": lambda x, e: x.sin(),
    "clamp": lambda x, e: x.clamp(-0.7, 1.2),
    "clamp above": lambda x, e: x.clamp(max=0.5),
    "positive": lambda x, e: (x > 0).float(),
    "not negative": lambda x, e: (x >= 0).float(),
    "is zero": lambda x, e: (x == 0).float(),
    "sign": lambda x, e: x.sign(),
    "detach": lambda x, e: x.detach(),
    "itself": lambda x, e: x - x.detach(),
    "bfloat16": lambda x, e: x.bfloat16().float() * 1.5,
    "double": lambda x, e: (x.double() * 0.1).float(),
    "long": lambda x, e: x * x.detach().nan_to_num(0, 9, -9).clamp(-9, 9).long(),
    "cumsum": lambda x, e: x.cumsum(1),
    "cumsum of rows": lambda x, e: x.cumsum(0),
    "flip": lambda x, e: x.flip(1),
    "roll": lambda x, e: x.roll(1, 0),
    "softmax": lambda x, e: x.softmax(-1),
    "log softmax": lambda x, e: x.log_softmax(-1),
    "softmax of rows": lambda x, e: x.softmax(0),
    "logsumexp": lambda x, e: x - x.logsumexp(1, keepdim=True),
    "row mean": lambda x, e: x.mean(1, keepdim=True).expand_as(x),
    "row sum": lambda x, e: x.sum(1, keepdim=True).expand_as(x),
    "column sum": lambda x, e: x.sum(0, keepdim=True).expand_as(x),
    "row max": lambda x, e: x.amax(1, keepdim=True).expand_as(x),
    "first max": lambda x, e: x.max(1, keepdim=True).values.expand_as(x),
    "mean": lambda x, e: x.mean().expand_as(x),
    "flat product": lambda x, e: (x.reshape(-1) * e["m"].reshape(-1)).view_as(x),
    "transposed view": lambda x, e: x.t().reshape(x.shape),
    "three dims": lambda x, e: (x.unsqueeze(2).expand(-1, -1, 2) * e["m"].unsqueeze(2)).sum(2),
    "shift": lambda x, e: torch.cat([x[:, 1:], x[:, :1]], 1),
    "shift in zeros": lambda x, e: F.pad(x[:, 1:], (0, 1)),
    "shift back": lambda x, e: F.pad(x[:, :-1], (1, 0)),
    "sort": lambda x, e: x.sort(1).values,
    "top": lambda x, e: x.topk(2, 1).values.sum(1, keepdim=True).expand_as(x),
    "times m": lambda x, e: x * e["m"],
    "times a": lambda x, e: x * e["a"],
    "times both": lambda x, e: x * e["a"] * e["m"],
    "complement": lambda x, e: 1 - x,
    "whitened": lambda x, e: (x - x.mean()) / (x.std() + 1e-6),
    "row whitened": lambda x, e: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True) + 1e-6),
    "masked mean": lambda x, e: (
        (x * e["m"]).sum(1, keepdim=True) / e["m"].sum(1, keepdim=True).clamp(min=1)
    ).expand_as(x),
    "filled": lambda x, e: x.masked_fill(e["m"] == 0, 0.0),
    "filled with -inf": lambda x, e: x.masked_fill(e["m"] == 0, float("-inf")).clamp(max=20).exp(),
    "put": lambda x, e: _put(x, e["m"] == 0, 0.0),
    "put one": lambda x, e: _put(x, e["m"] == 0, 1.0),
    "put by a": lambda x, e: _put(x, e["a"] == 0, 0.0),
    "column": lambda x, e: _column(x),
    "gate a": lambda x, e: torch.where(e["a"] > 0, x, torch.zeros_like(x)),
    "gate m": lambda x, e: torch.where(e["m"].bool(), x, 0.0 * x.detach()),
    "choice by a": lambda x, e: torch.where(e["a"] > 0, x, 0.5 * x),
    "one column": lambda x, e: x[:, 1:2].expand_as(x),
    "last row": lambda x, e: x[-1][None].expand_as(x),
    "even columns": lambda x, e: F.pad(x[:, ::2], (0, x.shape[1] - x[:, ::2].shape[1])),
    "twice": lambda x, e: torch.cat([x, x], 0)[: x.shape[0]],
    "swapped rows": lambda x, e: torch.cat([x[1:], x[:1]], 0),
    "gather": lambda x, e: x.gather(1, e["index"]),
    "rows by index": lambda x, e: x[e["index"][:, 0] % x.shape[0]],
    "index add": lambda x, e: torch.zeros_like(x).index_add(0, e["index"][:, 0] % x.shape[0], x),
    "scatter add": lambda x, e: torch.zeros_like(x).scatter_add(1, e["index"], x),
    "restored": lambda x, e: _restored(x, e),
    "norm": lambda x, e: torch.linalg.vector_norm(x, dim=1, keepdim=True).expand_as(x),
    "variance": lambda x, e: x.var(1, keepdim=True).expand_as(x),
    "outer product": lambda x, e: x @ x.t() @ x,
    "by rows": _by_rows,
    "unbound": lambda x, e: torch.stack(list(x.unbind(1)), 1),
    "chunked": lambda x, e: torch.cat([part * 2 for part in x.split(1, 1)], 1),
    "dropout": lambda x, e: F.dropout(x, 0.3),
    "layer norm": lambda x, e: F.layer_norm(x, x.shape[1:]),
    "triangle": lambda x, e: x.tril(),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor, Tensors], torch.Tensor]] = {
    "add": lambda x, y, e: x + y,
    "sub": lambda x, y, e: x - y,
    "mul": lambda x, y, e: x * y,
    "div": lambda x, y, e: x / y,
    "div above": lambda x, y, e: x / (y.abs() + 0.1),
    "minimum": lambda x, y, e: torch.minimum(x, y),
    "maximum": lambda x, y, e: torch.maximum(x, y),
    "where": lambda x, y, e: torch.where(x > y, x, y * 0.3),
    "times row sum": lambda x, y, e: x * y.sum(-1, keepdim=True),
    "lerp": lambda x, y, e: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y, e: torch.addcmul(x, y, e["m"]),
    "cat": lambda x, y, e: torch.cat([x[:, :1], y[:, 1:]], 1),
    "stack": lambda x, y, e: torch.stack([x, y]).sum(0),
    "hypot": lambda x, y, e: torch.hypot(x, y + 1),
    "atan2": lambda x, y, e: torch.atan2(x, y),
    "mse": lambda x, y, e: F.mse_loss(x, y, reduction="none"),
    "huber": lambda x, y, e: F.smooth_l1_loss(x, y, reduction="none"),
    "put part": lambda x, y, e: torch.slice_scatter(x, y[:, 1:], 1, 1),
    "product of matrices": lambda x, y, e: x @ y.t() @ x,
}
FINAL: dict[str, Callable[[torch.Tensor, Tensors], torch.Tensor]] = {
    "sum": lambda x, e: x.sum(),
    "mean": lambda x, e: x.mean(),
    "masked mean": lambda x, e: (x * e["m"]).sum() / e["m"].sum(),
    "masked mean above": lambda x, e: (x * e["m"]).sum() / (e["m"].sum() + 1e-4),
    "by selection": lambda x, e: x[e["m"].bool()].sum(),
    "mean of selection": lambda x, e: x[e["m"].bool()].mean(),
    "maximum": lambda x, e: x.max(),
    "rows": lambda x, e: ((x * e["m"]).sum(1) / e["m"].sum(1).clamp(min=1)).mean(),
    "both": lambda x, e: (x * e["a"] * e["m"]).sum(),
    "by a": lambda x, e: (x * e["a"]).sum(),
    "by row": lambda x, e: ((x * e["m"]).sum(1) * e["a"][:, 0]).mean(),
    "item": lambda x, e: (x * e["a"] * e["m"]).sum() / max(e["m"].sum().item(), 1.0),
    "cross entropy": lambda x, e: (_cross_entropy(x, e) * e["a"][:, 0] * e["m"][:, 0]).sum(),
}
KINDS = ("row", "token", "column")


def draw_expression(rng: random.Random, size: int) -> Expression:
    if size <= 1:
        return rng.choice(LEAVES)
    if rng.random() < 0.55:
        return (rng.choice(list(UNARY)), draw_expression(rng, size - 1))
    left = rng.randint(1, size - 1)
    return (rng.choice(list(BINARY)), draw_expression(rng, left), draw_expression(rng, size - left))


def evaluate(expression: Expression, e: Tensors) -> torch.Tensor:
    if isinstance(expression, str):
        return e[expression]
    operands = [evaluate(operand, e) for operand in expression[1:]]
    table: Any = UNARY if len(operands) == 1 else BINARY
    return table[expression[0]](*operands, e)


def draw_program(seed: int) -> tuple[Callable[..., torch.Tensor], str, str]:
    """A loss ``(x, old, adv, mask, index)``, how `adv` is laid out (one of KINDS), and the loss in words."""
    rng = random.Random(seed)
    expression, kind = draw_expression(rng, rng.randint(2, 9)), rng.choice(KINDS)
    final = rng.choice(list(FINAL))

    def loss(x, old, adv, mask, index):
        a = adv if kind == "token" else adv.reshape(adv.shape[0], 1).expand_as(mask)
        one = torch.ones_like(x)
        e = {"x": x, "old": old, "a": a, "m": mask, "am": a * mask, "half": one * 0.5, "one": one, "index": index}
        return FINAL[final](evaluate(expression, e) + 0 * x, e)

    return loss, kind, f"{final} of {expression} with adv by {kind}"


def draw_inputs(kind: str, seed: int, rows: int = 3, tokens: int = 4) -> Tensors:
    gen = torch.Generator().manual_seed(seed)
    shape = {"row": (rows,), "token": (rows, tokens), "column": (rows, 1)}[kind]
    adv = torch.randn(shape, generator=gen)
    adv[torch.rand(shape, generator=gen) < 0.3] = 0
    return {
        "x": torch.randn(rows, tokens, generator=gen) * (0.5, 1.0, 2.0)[seed % 3],
        "old": torch.randn(rows, tokens, generator=gen),
        "adv": adv,
        "mask": (torch.rand(rows, tokens, generator=gen) > 0.4).float(),
        "index": torch.randint(0, tokens, (rows, tokens), generator=gen),
    }
