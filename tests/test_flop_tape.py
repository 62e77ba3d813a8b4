"""The tape: every operator as torch counts it, recomputation told from backward, and not one bit changed."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode, is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from gradprune.counting.meter import FlopMeter
from gradprune.counting.rules import attention_backward_flops, attention_flops
from gradprune.counting.tape import Tape, record_backward, record_forward
from gradprune.flops import Phases
from tests.counting import assert_same, count_live, gradients, torch_counts
from tests.decoders import KINDS, make_decoder, make_tokens, policy_loss


def _convolve(transposed, x, weight):
    return (F.conv_transpose2d if transposed else F.conv2d)(x, weight, stride=2, padding=1)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "function, shapes",
    [
        (torch.mm, ((3, 4), (4, 5))),
        (torch.bmm, ((2, 3, 4), (2, 4, 5))),
        (lambda a, b: torch.addmm(torch.ones(5), a, b), ((3, 4), (4, 5))),
        (lambda a, b: torch.baddbmm(torch.ones(1, 1, 5), a, b), ((2, 3, 4), (2, 4, 5))),
        (lambda a, b: F.scaled_dot_product_attention(a, b, b), ((2, 4, 6, 8), (2, 4, 9, 8))),
        (lambda a, b: F.scaled_dot_product_attention(a, b, b, enable_gqa=True), ((2, 4, 6, 8), (2, 2, 9, 8))),
        (lambda a, b: _convolve(False, a, b), ((2, 3, 8, 8), (5, 3, 3, 3))),
        (lambda a, b: _convolve(True, a, b), ((2, 3, 8, 8), (3, 5, 3, 3))),
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((2, 3, 4), (2, 4, 5))),
        (lambda a, b: a @ b, ((2, 3, 4), (4, 5))),
    ],
)
def test_derives_each_operator_as_torch_runs_it(function, shapes, needs):
    inputs = [torch.randn(shape, requires_grad=need) for shape, need in zip(shapes, needs)]
    tape = Tape()
    with record_forward(tape):
        loss = function(*inputs).sin().sum()
    assert tape.derived() == Phases(*torch_counts(lambda: function(*inputs).sin().sum()))
    record_backward(tape, loss)
    loss.backward()
    assert tape.measured() == tape.derived()
    assert tape.derived().backward > 0


@pytest.mark.parametrize(
    "q, kv", [((2, 4, 6, 8), (2, 4, 9, 8)), ((1, 6, 5, 4), (1, 3, 5, 4)), ((3, 2, 1, 16), (3, 1, 7, 16))]
)
def test_attention_costs_what_torch_says_of_its_other_kernels(q, kv):
    assert attention_flops(q, kv, kv) == sdpa_flop_count(q, kv, kv)
    assert attention_backward_flops(q, q, kv, kv) == sdpa_backward_flop_count(q, q, kv, kv)


def test_grouped_products_are_counted():
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    rows, weights = torch.randn(8, 16), torch.randn(2, 16, 32)
    tape = Tape()
    with record_forward(tape):
        torch._grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=offsets)
    assert tape.measured().forward == 2 * 8 * 16 * 32


class OwnLinear(torch.autograd.Function):
    """Products in a hand-written forward and backward, as fused layers have them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@pytest.mark.parametrize("reentrant", [True, False])
def test_tells_recompute_from_backward_in_hand_written_layers(reentrant):
    # 3 x 4 times 4 x 4: 96 FLOPs a product. Two layers; the backward has two products each, the checkpoint runs both
    # layers again, save the last where it stops early: its input is all that is needed.
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    meter = FlopMeter()
    run = lambda: checkpoint(  # noqa: E731
        lambda t: OwnLinear.apply(OwnLinear.apply(t, weight).sin(), weight), x, use_reentrant=reentrant
    ).sum()
    count_live(meter, "k", run).backward()
    assert meter.cost("k").phases.forward == 2 * 96
    assert meter.cost("k").phases.backward == 4 * 96
    assert meter.cost("k").phases.recompute == 2 * 96
    forward, back = torch_counts(run)
    assert (forward, back) == (2 * 96, 6 * 96)


def test_survives_autograd_grad_retained_graphs_and_vector_losses():
    model, tokens = make_decoder(KINDS["dense"]), make_tokens(2, 5)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(policy_loss(model(tokens)), parameters)
    meter = FlopMeter()
    loss = count_live(meter, "k", lambda: policy_loss(model(tokens)))
    assert_same(torch.autograd.grad(loss, parameters, retain_graph=True), expected)
    once = meter.cost("k").phases.backward
    assert_same(torch.autograd.grad(loss, parameters), expected)
    assert meter.cost("k").phases.backward == 2 * once == 2 * torch_counts(lambda: policy_loss(model(tokens)))[1]

    direction = torch.linspace(0.5, 1, 8).view(2, 4)
    expected = torch.autograd.grad(model(tokens), parameters, direction)
    vector = count_live(meter, "v", lambda: model(tokens))
    assert_same(torch.autograd.grad(vector, parameters, direction), expected)
    assert meter.cost("v").phases == Phases(*torch_counts(lambda: model(tokens).sum()))


def test_double_backward_is_backward():
    x = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    meter = FlopMeter()
    loss = count_live(meter, "k", lambda: (x @ weight).sin().sum())
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    assert meter.cost("k").phases == Phases(96, 96)
    assert grad.requires_grad


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.prod(1).sum() + x.prod(),
        lambda x: (x.masked_fill(torch.eye(4, 5).bool(), x.sum()) * x).sum(),
        lambda x: x.cumprod(1).norm(3) + x.std(1).sum() + x.logsumexp(1).sum(),
        lambda x: torch.zeros(3, 5).index_add(0, torch.tensor([0, 1, 1, 2]), x).square().sum() + x[x > 0].sum(),
    ],
)
def test_operators_that_torch_runs_otherwise_under_a_mode_keep_their_bits(function):
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(4, 5, requires_grad=True)
        (expected,) = torch.autograd.grad(function(x), x)
        loss = count_live(FlopMeter(), "k", lambda x=x: function(x))
        assert_same(torch.autograd.grad(loss, x), [expected])


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


def test_an_exception_in_the_backward_leaves_no_mode_behind():
    x = torch.randn(3, 3, requires_grad=True)
    meter = FlopMeter()
    loss = count_live(meter, "k", lambda: (Explode.apply(x @ x) @ x).sum())
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss.backward()
    assert _get_current_dispatch_mode() is None
    assert not is_in_torch_dispatch_mode()


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_models_stay_compiled_and_are_counted(backend):
    torch._dynamo.reset()
    model, tokens, meter = make_decoder(KINDS["dense"]), make_tokens(2, 7), FlopMeter()
    expected = torch_counts(lambda: policy_loss(model(tokens)))
    model.zero_grad()
    compiled = torch.compile(model, backend=backend)
    policy_loss(compiled(tokens)).backward()
    plain = gradients(model)
    count_live(meter, "k", lambda: policy_loss(compiled(tokens))).backward()
    assert_same(gradients(model), plain)
    assert meter.cost("k").phases == Phases(*expected)
    torch._dynamo.reset()
