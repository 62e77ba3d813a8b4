"""The symbolic count equals torch's counter at every size, phase by phase."""

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from gradprune.cost import CostModel, LengthCost
from gradprune.counting.rules import EXTRA_FORMULAS
from gradprune.errors import PruneError
from gradprune.flops import Phases
from gradprune.passes.count_flops import GraphFlops, count_flops
from gradprune.trace import trace_joint


def torch_counts(fn, args) -> tuple[int, int]:
    with FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS) as ahead:
        loss = fn(*args)
    with FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS) as back:
        loss.backward()
    return ahead.get_total_flops(), back.get_total_flops()


def assert_counts(fn, make_args, names, wrt, shapes) -> GraphFlops:
    """Traced at the first shape, equal to torch's counter at all of them."""
    (joint,) = trace_joint(fn, make_args(*shapes[0]), names=names, wrt=wrt)
    flops = count_flops(joint)
    for shape in shapes:
        args = make_args(*shape)
        for name, tensor in zip(names, args):
            tensor.requires_grad_(name in wrt)
        phases = flops.at_inputs(dict(zip(names, args)))
        assert (phases.forward, phases.backward + phases.recompute) == torch_counts(fn, args)
        assert phases.total > 0
    return flops


def head(x_RTH, weight_VH):
    return F.linear(x_RTH, weight_VH).log_softmax(-1)[..., 0].mean()


def make_head(rows, length, hidden, vocabulary):
    return torch.randn(rows, length, hidden), torch.randn(vocabulary, hidden)


HEAD_SHAPES = [(2, 5, 6, 7), (3, 11, 8, 13), (7, 9, 5, 3)]


@pytest.mark.parametrize("wrt", [("x", "weight"), ("x",), ("weight",)])
def test_a_head_costs_one_product_per_gradient(wrt):
    flops = assert_counts(head, make_head, ("x", "weight"), wrt, HEAD_SHAPES)
    rows, length, hidden, vocabulary = (
        sympy.Symbol(name, integer=True, positive=True) for name in ("x[0]", "x[1]", "x[2]", "weight[0]")
    )
    product = 2 * rows * length * hidden * vocabulary
    assert flops.forward == product
    assert flops.backward == len(wrt) * product
    assert flops.recompute == 0 and flops.total == (1 + len(wrt)) * product
    assert flops.sizes["weight[1]"] == hidden


def attention(x_RTH, qkv_KH, out_HH):
    q, k, v = F.linear(x_RTH, qkv_KH).unflatten(-1, (6, -1)).transpose(1, 2).split([4, 1, 1], 1)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(attended.transpose(1, 2).flatten(2), out_HH).square().mean()


def make_attention(rows, length):
    return torch.randn(rows, length, 8), torch.randn(12, 8), torch.randn(8, 8)


@pytest.mark.parametrize("wrt", [("x", "qkv", "out"), ("out",)])
def test_attention_is_quadratic_in_the_length(wrt):
    flops = assert_counts(attention, make_attention, ("x", "qkv", "out"), wrt, [(2, 5), (3, 12), (1, 7)])
    length = sympy.Symbol("x[1]", integer=True, positive=True)
    assert sympy.degree(flops.forward, length) == 2
    # ("out",) needs no gradient of the attention: its backward is one product, linear in the length
    assert sympy.degree(flops.backward, length) == (1 if wrt == ("out",) else 2)


def products(a, b, c):
    return (torch.bmm(a, b) + torch.baddbmm(c, a, b)).sum() + torch.einsum("bij,bjk->ik", a, b).sum()


def make_products(batch, m, k, n):
    return torch.randn(batch, m, k), torch.randn(batch, k, n), torch.randn(batch, m, n)


@pytest.mark.parametrize("wrt", [("a", "b", "c"), ("a",), ("b",)])
def test_batched_products(wrt):
    assert_counts(products, make_products, ("a", "b", "c"), wrt, [(2, 3, 4, 5), (3, 7, 6, 2)])


def convolve(x, weight):
    return F.conv1d(x, weight, padding=1).sin().sum()


@pytest.mark.parametrize("wrt", [("x", "weight"), ("x",), ("weight",)])
def test_convolution(wrt):
    make = lambda rows, length: (torch.randn(rows, 4, length), torch.randn(6, 4, 3))  # noqa: E731
    assert_counts(convolve, make, ("x", "weight"), wrt, [(2, 9), (3, 16)])


class Forgetful(torch.autograd.Function):
    """A product of two whose backward makes the first again."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(x, first, second)
        return (x @ first).sin() @ second

    @staticmethod
    def backward(ctx, grad):
        x, first, second = ctx.saved_tensors
        inner = x @ first
        grad_inner = grad @ second.t() * inner.cos()
        return grad_inner @ first.t(), x.t() @ grad_inner, inner.sin().t() @ grad


def forgetful(x, first, second):
    return Forgetful.apply(x, first, second).square().sum()


def checkpointed(x, first, second):
    return checkpoint(lambda t: ((t @ first).sin() @ second).square(), x, use_reentrant=False).sum()


def make_two(rows):
    return torch.randn(rows, 6), torch.randn(6, 5), torch.randn(5, 7)


def test_separates_recompute_from_backward():
    # [R, 6] by 6 x 5, then 5 x 7: products of 60 R and 70 R FLOPs, two gradients each, the first product twice
    names = ("x", "first", "second")
    flops = assert_counts(forgetful, make_two, names, names, [(3,), (8,)])
    assert flops.at_inputs(dict(zip(names, make_two(10)))) == Phases(1300, 2600, 600)


def test_checkpoints_are_not_in_a_traced_graph():
    names = ("x", "first", "second")
    (joint,) = trace_joint(checkpointed, make_two(3), names=names, wrt=names)
    assert count_flops(joint).at_inputs(dict(zip(names, make_two(10)))) == Phases(1300, 2600, 0)


def test_elementwise_losses_cost_nothing():
    (joint,) = trace_joint(lambda x, m: (x.exp() * m).sum(), (torch.randn(2, 3), torch.ones(2, 3)), wrt=("x",))
    assert count_flops(joint).total == 0


def test_a_missing_size_is_named():
    (joint,) = trace_joint(head, make_head(2, 5, 6, 7), names=("x", "weight"), wrt=("x",))
    with pytest.raises(PruneError, match=r"FLOPs depend on weight\[0\], x\[2\]: give a value for each"):
        count_flops(joint).at({"x[0]": 1, "x[1]": 2})


def test_counting_adds_no_guard():
    (joint,) = trace_joint(products, make_products(2, 3, 4, 5), names=("a", "b", "c"), wrt=("a",))
    before = len(joint.shape_env.guards)
    assert count_flops(joint).total != 0
    assert len(joint.shape_env.guards) == before


OFFSETS = torch.tensor([0, 4, 9, 10], dtype=torch.int32)


def flash(q, k, v, cu):
    return torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, 9, 9, 0.0, True, False)[0].float().sum()


def efficient(q, k, v, cu):
    rows = (tensor[None] for tensor in (q, k, v))
    return torch.ops.aten._efficient_attention_forward(*rows, None, cu, cu, 9, 9, 0.0, 1, True)[0].float().sum()


def varlen(q, k, v, cu):
    return varlen_attn(q, k, v, cu, cu, 9, 9).float().sum()


@pytest.mark.parametrize("attention", [flash, efficient, varlen])
def test_packed_attention_is_linear_in_the_squared_lengths(attention):
    """Lengths 4, 5 and 1 in ten tokens: 42 pairs, not 100."""
    tensors = {
        "q": torch.empty(10, 4, 8, device="meta", dtype=torch.bfloat16),
        "k": torch.empty(10, 4, 8, device="meta", dtype=torch.bfloat16),
        "v": torch.empty(10, 4, 8, device="meta", dtype=torch.bfloat16),
        "cu": OFFSETS,
    }
    args = (*list(tensors.values())[:3], torch.empty(4, device="meta", dtype=torch.int32))
    (joint,) = trace_joint(attention, args, names=tuple(tensors), wrt=("q", "k", "v"))
    flops = count_flops(joint)
    squares = sympy.Symbol("squares(cu)", integer=True, positive=True)
    heads, width, value_width = (sympy.Symbol(name, integer=True, positive=True) for name in ("q[1]", "q[2]", "v[2]"))
    assert sympy.expand(flops.forward - 2 * heads * squares * (width + value_width)) == 0
    assert sympy.expand(flops.backward - 2 * heads * squares * (3 * width + 2 * value_width)) == 0
    queries = [torch.empty(10, 4, 8, device="meta")] * 3
    packets = (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    one, two = (flop_registry[packet] for packet in packets)
    expected = one(*queries, OFFSETS, OFFSETS, 5, 5), two(*queries[:1], *queries, None, None, OFFSETS, OFFSETS, 5, 5)
    phases = flops.at_inputs(tensors)
    assert (phases.forward, phases.backward) == expected == (2 * 4 * 42 * 16, 2 * 4 * 42 * 40)
    cost = CostModel.from_expressions("q[0]", [flops.forward, flops.backward], {"q[1]": 4, "q[2]": 8, "v[2]": 8})
    assert cost.forward == LengthCost(quadratic=2 * 4 * 16) and cost.phases([4, 5, 1]) == phases


def test_attention_over_other_keys_counts_pairs():
    """Offsets of queries and of keys, the former a copy of an input: 4 x 2 + 6 x 3 pairs."""

    def attend(q, k, v, cu_q, cu_k):
        offsets = cu_q.to(torch.int32)
        return torch.ops.aten._flash_attention_forward(q, k, v, offsets, cu_k, 9, 9, 0.0, False, False)[0].sum()

    names = ("q", "k", "v", "cu_q", "cu_k")
    meta = [torch.empty(size, device="meta") for size in ((10, 4, 8), (5, 4, 8), (5, 4, 8))]
    offsets = [torch.empty(3, device="meta", dtype=dtype) for dtype in (torch.int64, torch.int32)]
    (joint,) = trace_joint(attend, (*meta, *offsets), names=names, wrt=("q",))
    values = (torch.tensor([0, 4, 10]), torch.tensor([0, 2, 5], dtype=torch.int32))
    phases = count_flops(joint).at_inputs(dict(zip(names, (*meta, *values))))
    assert phases == Phases(2 * 4 * 26 * 16, 2 * 4 * 26 * 40)
    with pytest.raises(PruneError, match=r"FLOPs depend on pairs\(cu_q, cu_k\)"):
        count_flops(joint).at_inputs(dict(zip(names, meta)))


def test_a_packed_kernel_without_offsets_counts_its_rows():
    def attend(q, k, v):
        return torch.ops.aten._flash_attention_forward(q, k, v, None, None, 6, 6, 0.0, False, False)[0].sum()

    meta = [torch.empty(2, 6, 4, 8, device="meta") for _ in range(3)]
    (joint,) = trace_joint(attend, meta, names=("q", "k", "v"), wrt=("q",))
    assert count_flops(joint).at_inputs(dict(zip("qkv", meta))) == Phases(2 * 2 * 4 * 36 * 16, 2 * 2 * 4 * 36 * 40)
