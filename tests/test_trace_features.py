"""What real losses are written with must not stop a trace, and must not change what is traced."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gradprune.errors import TraceError
from tests.programs import WORDS, assert_faithful, example, run, trace, watch


@torch.compile
def compiled_ratio(new, old):
    return torch.exp(new - old)


@torch.compile(fullgraph=True, dynamic=True)
def compiled_log_softmax(logits):
    return logits.log_softmax(-1)


@torch.jit.script
def scripted_ratio(new, old):
    return torch.exp(new - old) * 2


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class ScaleByOutside(torch.autograd.Function):
    factor = torch.tensor(3.0, dtype=torch.float64)

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ScaleByOutside.factor


def compiled_helper(logp, old, adv):
    return -(compiled_ratio(logp, old) * adv[:, None]).sum()


def compiled_whole_helper(logits, labels, adv):
    return -(compiled_log_softmax(logits).gather(-1, labels[..., None])[..., 0] * adv[:, None]).mean()


def scripted_helper(logp, old, adv):
    return -(scripted_ratio(logp, old) * adv[:, None]).mean()


def custom_function(logp, adv):
    return (Scale.apply(logp, 2.0) * adv[:, None]).sum()


def checkpointed(logp, adv):
    return (checkpoint(torch.exp, logp, use_reentrant=False) * adv[:, None]).sum()


def detached_coefficient(logp, adv):
    with torch.no_grad():
        coefficient = (logp * 2).exp()
    return (coefficient * logp * adv[:, None]).sum()


def masked_assignment(logp, mask, adv):
    kept = logp.clone()
    kept[mask == 0] = 0.0
    kept[:, 0] = 0
    return (kept.masked_fill_(mask == 0, 1.0) * adv[:, None]).sum()


def view_written_to(logp, adv):
    doubled = logp * 2
    doubled[0].mul_(3)
    return (doubled * adv[:, None]).sum()


def hooked(logp, adv):
    doubled = logp * 2
    doubled.register_hook(lambda grad: grad * 0.5)
    return (doubled * adv[:, None]).sum()


def lower_precision(logits, labels, adv):
    with torch.autocast("cpu", torch.bfloat16):
        hidden = logits.float() @ torch.ones(WORDS, WORDS)
    chosen = hidden.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return -(chosen * adv[:, None]).mean()


def there_and_back(logp, adv):
    return (logp.to(torch.float64).to("cpu").double() * adv.cpu()[:, None]).sum()


def cross_entropy(logits, labels, adv):
    nll = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="none", ignore_index=-100)
    return (nll.view(labels.shape) * adv[:, None]).mean()


def einsum(logp, adv):
    return torch.einsum("bt,b->bt", logp, adv).mean()


def packed_sums(logp, adv):
    rows = torch.repeat_interleave(torch.arange(logp.shape[0]), logp.shape[1])
    sums = torch.zeros(logp.shape[0], dtype=logp.dtype).scatter_add(0, rows, logp.flatten())
    return (sums * adv).mean()


def indexed_by_mask(logp, adv, mask):
    chosen = mask.bool()
    return (logp[chosen] * adv[:, None].expand_as(logp)[chosen]).mean()


def gradient_inside(logp, adv):
    loss = (logp.exp() * adv[:, None]).sum()
    (inner,) = torch.autograd.grad(loss, logp, create_graph=True)
    return loss + inner.pow(2).sum()


def rows_in_a_loop(logp, adv, mask):
    losses = [(row * kept).sum() * gain for row, kept, gain in zip(logp, mask, adv)]
    return torch.stack(losses).mean()


SEEN_WHOLE = [
    *(scripted_helper, custom_function, checkpointed, detached_coefficient, masked_assignment, view_written_to),
    *(hooked, lower_precision, there_and_back, cross_entropy, einsum, packed_sums, indexed_by_mask, gradient_inside),
    rows_in_a_loop,
]


@pytest.mark.parametrize("program", SEEN_WHOLE, ids=lambda program: program.__name__)
def test_traces(program):
    assert_faithful(program, trace(program), example(1))


@pytest.mark.parametrize("program", [compiled_helper, compiled_whole_helper], ids=lambda program: program.__name__)
def test_compiled_helper_is_traced_uncompiled(program, monkeypatch):
    (joint,) = trace(program)
    lines = {node.meta["where"].function for node in joint.graph_module.graph.nodes if node.meta.get("where")}
    assert lines & {"compiled_ratio", "compiled_log_softmax"}


def test_compiled_helper_ends_a_watch_and_works(monkeypatch):
    """A function mode that stays on while a compiled function runs would be compiled into it."""
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    helper = torch.compile(lambda x: x.log_softmax(-1), fullgraph=True, backend=backend)

    def step(logits, labels, adv):
        return (helper(logits).gather(-1, labels[..., None])[..., 0] * adv[:, None]).mean()

    joints = trace(step)
    assert not seen, "a trace compiles nothing"
    comparison = watch(step, joints, example())
    assert comparison.matched is None and "torch.compile" in comparison.difference
    assert len(seen) == 1


def test_reentrant_checkpoint():
    def step(logp, adv):
        return (checkpoint(torch.exp, logp, use_reentrant=True) * adv[:, None]).sum()

    def plain(logp, adv):
        return (torch.exp(logp) * adv[:, None]).sum()

    joints = trace(step)
    assert watch(step, joints, example()).matched == 0
    assert watch(plain, joints, example()).matched is None
    targets = [[node.target for node in trace(f)[0].graph_module.graph.nodes] for f in (step, plain)]
    assert targets[0] == targets[1]


def test_backward_of_a_function_reads_no_outside_value():
    def step(logp, adv):
        return (ScaleByOutside.apply(logp) * adv[:, None]).sum()

    (joint,) = trace(step)
    assert_faithful(step, (joint,), example(), state0=ScaleByOutside.factor)


METRICS = defaultdict(list)


def many_metrics(logp, adv, mask):
    loss = (logp * adv[:, None] * mask).sum() / mask.sum()
    METRICS["item"].append(loss.item())
    METRICS["text"].append(f"{loss.item():.3f} {loss:.2f} {loss} {logp} {mask.sum().item():.0f}")
    METRICS["float"].append(float(loss.detach()))
    METRICS["numpy"].append(float(logp.detach().cpu().numpy().mean()))
    METRICS["mean"].append(np.mean([loss.item(), adv.mean().item()]))
    METRICS["round"].append(round(loss.item(), 3))
    METRICS["count"].append(int(mask.sum()))
    METRICS["list"].append(adv.tolist())
    METRICS["quantile"].append(torch.quantile(logp.detach(), 0.5).item())
    METRICS["histogram"].append(logp.detach().histc(10))
    METRICS["unique"].append(torch.unique(adv).numel())
    METRICS["bins"].append(torch.bincount(mask.long().flatten()))
    METRICS["dict"].append({key: value.item() for key, value in (("kl", logp.mean()),)})
    MagicMock().log({"loss": loss.detach(), "x": loss.item()})
    logging.getLogger(__name__).info("loss %s", loss)
    return loss


def test_metrics_do_not_stop_a_trace():
    (joint,) = trace(many_metrics)
    assert joint.symbolic == ()  # quantile decides by the number of elements: these are not any sizes
    targets = {str(node.target) for node in joint.graph_module.graph.nodes}
    assert not any("quantile" in target or "histc" in target or "bincount" in target for target in targets)


def test_metric_that_flows_into_the_loss_stops_it():
    def step(logp, adv):
        return (logp * adv[:, None]).sum() * float(logp.detach().numpy().mean())

    with pytest.raises(TraceError, match="the data of a tensor, as numpy gives it") as error:
        trace(step)
    assert "numpy()" in error.value.where.text


def test_unknown_written_into_a_live_tensor_stops_it():
    def step(logp, adv):
        kept = logp * 1
        kept[0, 0] = logp.detach().numpy().mean()
        return (kept * adv[:, None]).sum()

    with pytest.raises(TraceError, match="the data of a tensor"):
        trace(step)


def test_json_of_a_data_number_is_refused():
    def step(logp, adv):
        loss = (logp * adv[:, None]).sum()
        return loss * len(json.dumps(loss.item()))

    with pytest.raises(TraceError):
        trace(step)


def test_caught_torch_error_is_refused():
    def step(logp, adv):
        try:
            factor = torch.ones(3) @ torch.ones(4)
        except RuntimeError:
            factor = 1.0
        return (logp * adv[:, None]).sum() * factor

    with pytest.raises(TraceError, match="catches an error of a torch call"):
        trace(step)


def test_random_choice_is_drawn_anew():
    def step(logp, adv):
        torch.manual_seed(7)
        order = torch.randperm(logp.shape[0])
        return (F.dropout(logp, 0.1)[order] * adv[order][:, None]).sum()

    (joint,) = trace(step)
    assert any("randperm" in str(node.target) for node in joint.graph_module.graph.nodes)
    assert watch(step, (joint,), example()).matched == 0
    assert run(step, example())[1]["logp"].any()


def test_unused_gradient_is_none():
    def step(logp, adv):
        return (adv * 2).sum()

    (joint,) = trace(step)
    assert joint.gradients == {"logp": None}
