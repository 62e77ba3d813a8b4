"""A core attention that runs anywhere, in place of TransformerEngine's: causal, packed (THD) and context parallel.

Exact and quadratic, for small shapes. Context parallelism gathers keys and values over the group in the forward and
sums their gradients back in the backward: a backward that waits for its peers, as TransformerEngine's does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule


class PlainAttention(MegatronModule):
    """Takes the constructor's arguments of a core attention; the packed lengths must divide by twice the CP size."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = kwargs.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)
        self.group = kwargs["pg_collection"].cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        packed = packed_seq_params is not None
        if packed and query.dim() == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        size, rank = self.group.size(), self.group.rank()
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist() if packed else [len(query) * size]
        mine = positions(lengths, rank, size)
        all_ = torch.cat([positions(lengths, other, size) for other in range(size)], dim=1)
        visible = (mine[0][:, None] == all_[0][None]) & (mine[1][:, None] >= all_[1][None])
        visible = visible.to(query.device)
        if size > 1:
            key, value = _Gather.apply(key, self.group), _Gather.apply(value, self.group)
        repeats = query.size(2) // key.size(2)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, *_repeated(repeats, key, value)))
        scores = (q @ k.transpose(-1, -2)) * self.scale
        weights = scores.masked_fill(~visible, float("-inf")).float().softmax(dim=-1).to(q.dtype)
        out = (weights @ v).permute(2, 0, 1, 3).contiguous()
        return out.view(len(query), -1) if packed else out.view(len(query), out.size(1), -1)


def positions(lengths: list[int], rank: int, size: int) -> torch.Tensor:
    """[2, tokens]: sequence and position in it of each token that context-parallel `rank` holds, zig-zag."""
    parts = []
    for sequence, length in enumerate(lengths):
        chunks = torch.arange(length).chunk(2 * size) if size > 1 else [torch.arange(length)]
        held = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) if size > 1 else chunks[0]
        parts.append(torch.stack([torch.full_like(held, sequence), held]))
    return torch.cat(parts, dim=1)


def plain_attention_spec(config: Any) -> Any:
    """The local layer spec with `PlainAttention` as its core."""
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    spec.submodules.self_attention.submodules.core_attention = PlainAttention
    return spec


def _repeated(repeats: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.repeat_interleave(repeats, 2) if repeats > 1 else tensor for tensor in tensors)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.length = group, len(tensor)
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        start = ctx.group.rank() * ctx.length
        return gradient[start : start + ctx.length].clone(), None
