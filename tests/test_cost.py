"""The cost model: its closed form, its measurement and its symbolic form are one, and agree with the literature."""

import json
import math

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from gradprune.cost import CostModel, LengthCost, TimedCost, Timing
from gradprune.counting.decoder_shape import DecoderShape
from gradprune.errors import PruneError
from gradprune.flops import Phases
from gradprune.passes.count_flops import count_flops
from gradprune.trace import trace_joint
from tests.decoders import KINDS, DecoderConfig, make_decoder, make_tokens, policy_loss


def shape_of(config: DecoderConfig) -> DecoderShape:
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        gated=config.gated,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok if config.num_experts else 0,
    )


def step(model, tokens):
    return policy_loss(model(tokens))


def derive(config: DecoderConfig) -> CostModel:
    return CostModel.derive(step, make_decoder(config), lambda length: make_tokens(1, length))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "non-reentrant"])
def test_closed_form_equals_counting(kind):
    config = KINDS[kind]
    closed = CostModel.from_config(
        shape_of(config),
        checkpointing="full" if config.checkpointing == "reentrant" else "none",
        lora_rank=config.lora_rank,
    )
    assert derive(config) == closed


def test_a_checkpoint_that_stops_early_spares_the_last_product_of_each_block():
    config = KINDS["non-reentrant"]
    closed = CostModel.from_config(shape_of(config), checkpointing="full")
    down = 2 * config.intermediate_size * config.hidden_size * config.num_hidden_layers
    counted = derive(config)
    assert counted.recompute == LengthCost(0, closed.recompute.linear - down, closed.recompute.quadratic)
    assert (counted.forward, counted.backward) == (closed.forward, closed.backward)


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
}
HUGGING_FACE = {
    "llama": LlamaConfig(**TINY),
    "llama-tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "mistral": MistralConfig(**TINY, sliding_window=None),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=12),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(
        **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[1]
    ),
}


def hugging_face_step(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)[..., 0].mean()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_configs_equal_counting(name, attention):
    config = HUGGING_FACE[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    counted = CostModel.derive(hugging_face_step, model, lambda length: make_tokens(1, length))
    assert counted == CostModel.from_config(config, fused_attention=attention == "sdpa")


def test_megatron_configs_give_the_shape():
    transformer_config = pytest.importorskip("megatron.core.transformer.transformer_config")
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "use_cpu_initialization": True}
    dense = transformer_config.TransformerConfig(**sizes, num_query_groups=2, ffn_hidden_size=96)
    assert DecoderShape.read(dense, vocab=128) == DecoderShape(4, 64, 8, 2, 8, 96, 128, gated=False)
    experts = transformer_config.TransformerConfig(
        **sizes,
        gated_linear_unit=True,
        add_bias_linear=False,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_layer_freq=2,
        moe_shared_expert_intermediate_size=48,
    )
    # layers 0 and 2 are sparse, 1 and 3 dense with the default inner width of four hidden sizes
    assert DecoderShape.read(experts, vocab=128) == DecoderShape(
        4, 64, 8, 8, 8, 32, 128, experts=8, top_k=2, dense_layers=2, dense_ffn=256, shared_ffn=48
    )
    with pytest.raises(PruneError, match="pass vocab"):
        DecoderShape.read(dense)


def test_refuses_configs_whose_flops_it_does_not_know():
    with pytest.raises(PruneError, match="model type 'gpt2' has no closed form here"):
        CostModel.from_config(GPT2Config())
    with pytest.raises(PruneError, match="sliding_window=4096 bounds the attention"):
        CostModel.from_config(MistralConfig())
    with pytest.raises(PruneError, match="dict is neither a Hugging Face nor a Megatron config"):
        CostModel.from_config({})
    with pytest.raises(PruneError, match="heads a multiple of kv_heads"):
        DecoderShape(1, 8, 3, 2, 4, 8, 8)


def test_llama_2_7b_has_the_published_number_of_weights():
    # 6,738,415,616 parameters = products + embedding (32000 x 4096) + 65 norms of 4096
    cost = CostModel.from_config(LlamaConfig())
    assert cost.forward.linear // 2 == 6_738_415_616 - 32000 * 4096 - 65 * 4096


def test_training_costs_6nd_and_the_attention_term_of_palm():
    # Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T FLOPs per token, N without embeddings
    shape = DecoderShape(layers=3, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=100, gated=False)
    cost = CostModel.from_config(shape, fused_attention=False)
    weights = 3 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 100
    for length in (1, 17, 512):
        assert cost.phases([length]).total == length * (6 * weights + 12 * 3 * 4 * 16 * length)


def test_full_recomputation_costs_what_megatron_published():
    # Narayanan et al. 2021: 96 B s l h^2 (1 + s / 6 h + V / 16 l h) with full recomputation and an inner width of 4 h
    layers, hidden, vocab = 5, 48, 1000
    shape = DecoderShape(layers, hidden, 6, 6, 8, 4 * hidden, vocab, gated=False)
    cost = CostModel.from_config(shape, fused_attention=False, checkpointing="full")
    for batch, length in ((1, 7), (4, 128)):
        published = 96 * batch * length * layers * hidden**2
        published += 16 * batch * length**2 * layers * hidden + 6 * batch * length * hidden * vocab
        assert cost.phases([length] * batch).total == published


def attention_step(x, qkv, out):
    q, k, v = F.linear(x, qkv).unflatten(-1, (6, -1)).transpose(1, 2).split([4, 1, 1], 1)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(attended.transpose(1, 2).flatten(2), out).square().mean()


def test_the_symbolic_count_becomes_a_function_of_the_length():
    weights = {"qkv": torch.randn(12, 8), "out": torch.randn(8, 8)}
    (joint,) = trace_joint(
        attention_step, (torch.randn(2, 5, 8), *weights.values()), names=("x", "qkv", "out"), wrt=("qkv", "out")
    )
    flops = count_flops(joint)
    sizes = {f"{name}[{i}]": n for name, tensor in weights.items() for i, n in enumerate(tensor.shape)}
    sizes |= {"x[0]": 1, "x[2]": 8}
    cost = CostModel.from_expressions("x[1]", [flops.forward, flops.backward], sizes)
    # projections to 12 and 8 of 8; scores of 4 heads of width 2; x needs no gradient, so that qkv has one product
    assert cost.forward == LengthCost(0, 2 * 8 * 12 + 2 * 8 * 8, 4 * 4 * 2)
    assert cost.backward == LengthCost(0, 2 * 8 * 12 + 2 * 2 * 8 * 8, 10 * 4 * 2)
    assert cost.phases([9]) == flops.at({**sizes, "x[1]": 9})
    with pytest.raises(PruneError, match=r"cost depends on x\[1\], x\[2\]: give a size to all but 'x\[1\]'"):
        CostModel.from_expressions("x[1]", [flops.forward], {key: n for key, n in sizes.items() if key != "x[2]"})


def test_only_quadratic_costs_with_whole_coefficients_are_taken():
    n = sympy.Symbol("n")
    assert LengthCost.from_expression(3 + 2 * n * (n + 5), "n") == LengthCost(3, 10, 2)
    assert LengthCost.from_expression(sympy.Integer(4), "n") == LengthCost(4, 0, 0)
    for bad in (n**3, n / 2, sympy.ceiling(n / 2), 1 / n):
        with pytest.raises(PruneError, match="is no quadratic polynomial of 'n' with whole coefficients"):
            LengthCost.from_expression(bad, "n")


def test_counts_that_are_no_polynomial_are_refused():
    counts = {n: Phases(n * n, 2 * n) for n in (2, 3, 5, 8)}
    assert CostModel.from_counts(counts) == CostModel(LengthCost(0, 0, 1), LengthCost(0, 2, 0))
    with pytest.raises(PruneError, match="no quadratic polynomial"):
        CostModel.from_counts({**counts, 8: Phases(65, 16)})
    with pytest.raises(PruneError, match="counted at 3 lengths: count at 4"):
        CostModel.from_counts({n: Phases(n) for n in (1, 2, 3)})


def test_deriving_leaves_gradients_and_random_state_alone():
    model = make_decoder(KINDS["dense"])
    kept = torch.ones_like(model.head.weight)
    model.head.weight.grad = kept
    state = torch.get_rng_state()
    CostModel.derive(lambda m, b: (step(m, F.dropout(b.float(), 0.5).long().clamp(0, 39)), {}), model, make_row)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.head.weight.grad is kept and torch.equal(kept, torch.ones_like(kept))
    assert model.embedding.weight.grad is None


def make_row(length):
    return make_tokens(1, length)


def test_a_large_model_is_derived_on_the_meta_device():
    # On meta the attention is decomposed: two products forward, four backward, as fused_attention=False says.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=2))
        cost = CostModel.derive(
            lambda m, b: m(input_ids=b, use_cache=False, attention_mask={"full_attention": None}).logits.mean(),
            model,
            lambda length: torch.zeros((1, length), dtype=torch.long),
        )
    assert cost == CostModel.from_config(Qwen3Config(num_hidden_layers=2), fused_attention=False)


def test_lengths_are_counted_as_one_array():
    cost = CostModel.from_config(Qwen3Config())
    lengths = np.random.default_rng(0).integers(1, 8193, 1000)
    assert cost(lengths).shape == (1000,) and cost(lengths).dtype == np.float64
    assert [int(value) for value in cost(lengths)] == [cost.forward.total([n]) for n in lengths]
    assert [int(value) for value in cost.whole(lengths[:9])] == [cost.phases([n]).total for n in lengths[:9]]
    assert cost.phases(lengths.tolist()).forward == sum(cost.forward.total([n]) for n in lengths)


COST = CostModel(LengthCost(0, 1000, 2), LengthCost(0, 2000, 5))


def test_two_timings_calibrate():
    # 2^-30 s per FLOP and 2^-20 s per token are exact in binary, and so is what follows from them
    def timing(lengths, dead):
        flops = COST.phases(lengths).forward if dead else COST.phases(lengths).total
        return Timing(lengths, flops * 2.0**-30 + sum(lengths) * 2.0**-20, dead)

    for dead in (False, True):
        timed = COST.calibrate(timing((16, 16, 32), dead), timing((1024,), False))
        assert (timed.seconds_per_flop, timed.seconds_per_token) == (2.0**-30, 2.0**-20)
    assert timed.seconds([1024])[0] == timing((1024,), False).seconds
    assert timed([1024])[0] == timed.seconds([1024], dead=True)[0] == timing((1024,), True).seconds


def test_timings_that_say_nothing_are_refused():
    with pytest.raises(PruneError, match="equal FLOPs per token"):
        COST.calibrate(Timing((64,), 1.0), Timing((64, 64), 2.0))
    with pytest.raises(PruneError, match="repeat them warm"):
        COST.calibrate(Timing((64,), 1.0), Timing((4096,), 0.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Timing((64,), float("nan")), "seconds is nan"),
        (lambda: Timing((64,), float("inf")), "seconds is inf"),
        (lambda: Timing((64,), -1.0), "seconds is -1.0"),
        (lambda: Timing((64,), "1"), "seconds is '1'"),
        (lambda: Timing((), 1.0), "at least one"),
        (lambda: Timing((8, 5.7), 1.0), r"lengths\[1\] is 5.7"),
        (lambda: COST.phases([8, -3]), r"lengths\[1\] is -3"),
        (lambda: COST.phases([1.5]), r"lengths\[0\] is 1.5"),
        (lambda: CostModel.from_config(Qwen3Config(), checkpointing="ful"), "checkpointing is 'ful'"),
        (lambda: CostModel.from_config(Qwen3Config(), lora_rank=-3), "lora_rank is -3"),
        (lambda: CostModel.from_config(Qwen3Config(), lora_rank=1.5), "lora_rank is 1.5"),
    ],
)
def test_refuses_what_cannot_be(call, message):
    with pytest.raises(PruneError, match=message):
        call()


def test_timings_and_lengths_may_be_of_numpy():
    assert Timing(np.array([4, 8]), np.float32(0.5)) == Timing((4, 8), 0.5)
    assert COST.phases(np.array([4, 8])) == COST.phases((4, 8)) and COST.phases([]) == Phases()


def test_json_round_trip(tmp_path):
    cost = CostModel.from_config(Qwen3Config(), checkpointing="full")
    assert CostModel.from_json(json.loads(json.dumps(cost.to_json()))) == cost
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost
    timed = TimedCost(cost, 1e-15, 3e-7)
    timed.save(tmp_path / "timed.json")
    assert TimedCost.load(tmp_path / "timed.json") == timed
    with pytest.raises(TypeError):
        CostModel.from_json({"forward": {}})


def test_huge_models_do_not_overflow():
    shape = DecoderShape(layers=128, hidden=2**15, heads=256, kv_heads=8, head_dim=128, ffn=2**17, vocab=2**18)
    total = CostModel.from_config(shape).phases([2**20] * 1024).total
    assert total > 2**63 and math.isfinite(float(total))
