"""The sizes that a decoder's FLOPs depend on, read from the configurations that people have, and its linear maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradprune.errors import PruneError

HUGGING_FACE_TYPES = ("gemma", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose shape is read exactly; all of them have gated feed-forwards."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder. `ffn` is the inner width of a dense feed-forward or of one expert.

    experts, top_k: 0 and 0 for a dense model. dense_layers: how many layers have a dense feed-forward of width
    `dense_ffn` all the same. shared_ffn: inner width of the experts that every token visits.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    experts: int = 0
    top_k: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.vocab)
        if min(sizes) < 1 or self.heads % self.kv_heads or bool(self.experts) != bool(self.top_k):
            raise PruneError(f"{self} is no decoder: sizes must be positive, heads a multiple of kv_heads")

    @classmethod
    def read(cls, config: Any, vocab: int | None = None) -> DecoderShape:
        """From a Hugging Face config (of `HUGGING_FACE_TYPES`) or a Megatron ``TransformerConfig`` with `vocab`.

        Raises PruneError for a config whose FLOPs this closed form does not know.
        """
        if isinstance(config, DecoderShape):
            return config
        if hasattr(config, "model_type"):
            return _read_hugging_face(config)
        if hasattr(config, "num_query_groups"):
            return _read_megatron(config, vocab)
        raise PruneError(
            f"{type(config).__name__} is neither a Hugging Face nor a Megatron config: pass a DecoderShape, "
            "or measure with CostModel.derive"
        )


def _read_hugging_face(config: Any) -> DecoderShape:
    if config.model_type not in HUGGING_FACE_TYPES:
        raise PruneError(
            f"model type {config.model_type!r} has no closed form here (known: {', '.join(HUGGING_FACE_TYPES)}): "
            "pass a DecoderShape, or measure with CostModel.derive"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise PruneError(
            f"sliding_window={config.sliding_window} bounds the attention: pass a config without it where sequences "
            "are shorter, or measure with CostModel.derive"
        )
    experts, ffn = 0, config.intermediate_size
    if config.model_type in ("mixtral", "qwen3_moe"):
        experts = config.num_local_experts
    if config.model_type == "qwen3_moe":
        ffn = config.moe_intermediate_size
    dense = _dense_layers(config) if config.model_type == "qwen3_moe" else 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=config.vocab_size,
        experts=experts,
        top_k=config.num_experts_per_tok if experts else 0,
        dense_layers=dense,
        dense_ffn=config.intermediate_size if dense else 0,
    )


def _dense_layers(config: Any) -> int:
    sparse = [
        index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0
        for index in range(config.num_hidden_layers)
    ]
    return sparse.count(False)


def _read_megatron(config: Any, vocab: int | None) -> DecoderShape:
    if vocab is None:
        raise PruneError("a Megatron config has no vocabulary size: pass vocab, the padded size of the output layer")
    if config.multi_latent_attention:
        raise PruneError("multi-latent attention has no closed form here: measure with CostModel.derive")
    experts = config.num_moe_experts or 0
    dense = 0
    if experts:
        frequency = config.moe_layer_freq
        pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(config.num_layers)]
        dense = sum(not sparse for sparse in pattern)
    return DecoderShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        ffn=config.moe_ffn_hidden_size if experts else config.ffn_hidden_size,
        vocab=vocab,
        gated=config.gated_linear_unit,
        experts=experts,
        top_k=config.moe_router_topk if experts else 0,
        dense_layers=dense,
        dense_ffn=config.ffn_hidden_size if dense else 0,
        shared_ffn=(config.moe_shared_expert_intermediate_size or 0) if experts else 0,
    )


@dataclass(frozen=True)
class Projection:
    """A linear map that each token passes `times` times.

    place: ``first`` reads the embedding (through a norm); gradients: how many of its two gradients are computed.
    """

    inputs: int
    outputs: int
    times: int = 1
    place: Literal["first", "block", "router", "head"] = "block"
    gradients: int = 2

    @property
    def flops(self) -> int:
        """FLOPs per token, forward."""
        return 2 * self.inputs * self.outputs * self.times


def projections(shape: DecoderShape) -> Iterator[Projection]:
    """Every linear map of the decoder."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        place: Literal["first", "block"] = "first" if layer == 0 else "block"
        yield from (Projection(shape.hidden, outputs, place=place) for outputs in (queries, keys, keys))
        yield Projection(queries, shape.hidden)
        if shape.experts and layer >= shape.dense_layers:
            yield Projection(shape.hidden, shape.experts, place="router")
            yield from _feed_forward(shape, shape.ffn, shape.top_k)
            if shape.shared_ffn:
                yield from _feed_forward(shape, shape.shared_ffn, 1)
        else:
            yield from _feed_forward(shape, shape.dense_ffn if shape.experts else shape.ffn, 1)
    yield Projection(shape.hidden, shape.vocab, place="head")


def _feed_forward(shape: DecoderShape, width: int, times: int) -> Iterator[Projection]:
    yield from (Projection(shape.hidden, width, times) for _ in range(2 if shape.gated else 1))
    yield Projection(width, shape.hidden, times)


def with_adapters(item: Projection, rank: int) -> Iterator[Projection]:
    """The map itself, or for rank > 0 the frozen map and its low-rank update. Routers and heads get none.

    Frozen embeddings need no gradient, so neither do the inputs of the ``first`` maps.
    """
    if rank == 0:
        yield item
        return
    inward = int(item.place != "first")
    yield replace(item, gradients=inward)
    if item.place in ("first", "block"):
        yield replace(item, outputs=rank, gradients=1 + inward)
        yield replace(item, inputs=rank)
