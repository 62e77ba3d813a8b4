"""attach() wraps the user's objects and nothing else, refuses by name, and can be undone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

import gradprune
import gradprune.megatron
from gradprune.errors import NoEffectWarning, PruneError
from tests.megatron.arms import bind, forward_backward
from tests.megatron.layouts import MICROBATCHES, Layout, Trainee, build, make_batches, make_forward_step
from tests.megatron.matrix import EXPERT_BIAS, EXPERTS, NO_BIAS, OVERLAP, SELECTIVE

SELECTIVE_ONE = Layout("1 rank, selective", config={**SELECTIVE, **NO_BIAS})
ONE = Layout("1 rank, overlap", ddp=OVERLAP, config=EXPERT_BIAS)


@contextmanager
def trainee_of(layout: Layout) -> Iterator[Trainee]:
    trainee = build(layout)
    try:
        yield trainee
    finally:
        parallel_state.destroy_model_parallel()


def wrapped(trainee: Trainee) -> list[str]:
    """What of gradprune's hangs on the user's objects."""
    chunk = trainee.chunks[0]
    owners = [chunk, trainee.config, *chunk.bucket_groups, *chunk.expert_parallel_bucket_groups, *chunk.modules()]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if str(getattr(value, "__module__", "")).startswith("gradprune")
    ]


def attaches_and_detaches() -> None:
    with trainee_of(ONE) as trainee:
        routing = TopKRouter.routing
        assert wrapped(trainee) == []
        schedule = gradprune.megatron.attach(trainee.chunks, trainee.config)
        assert {"GPTModel.set_input_tensor", "DistributedDataParallel.finish_grad_sync"} <= set(wrapped(trainee))
        step = gradprune.compile(make_forward_step(ONE), zero="advantages * loss_mask", schedule=schedule)
        for number in range(2):
            for chunk in trainee.chunks:
                chunk.zero_grad_buffer()
            forward_backward(ONE, trainee, step, bind(ONE, step, make_batches(number, {0, 2})))
        with pytest.raises(PruneError, match="attached already"):
            gradprune.megatron.attach(trainee.chunks[0])
        schedule.detach()
        schedule.detach()
        assert wrapped(trainee) == [] and TopKRouter.routing is routing
        assert "detached" in str(schedule.refusal())
        with gradprune.megatron.attach(trainee.chunks[0]) as again:
            assert again.refusal() is None
        assert wrapped(trainee) == []


def refuses_by_name() -> None:
    layout = Layout("experts", config={**EXPERTS, "moe_z_loss_coeff": 0.1})
    with trainee_of(layout) as trainee:
        with pytest.raises(PruneError, match=r"strict: TransformerConfig.moe_z_loss_coeff=0.1: the router's z-loss"):
            gradprune.megatron.attach(trainee.chunks, trainee.config, strict=True)
        with gradprune.megatron.attach(trainee.chunks, trainee.config) as schedule:
            step = gradprune.compile(make_forward_step(layout), zero="advantages * loss_mask", schedule=schedule)
            with pytest.warns(NoEffectWarning, match="moe_z_loss_coeff") as warned:
                forward_backward(layout, trainee, step, bind(layout, step, make_batches(0, {0, 2})))
            assert sum(item.category is NoEffectWarning for item in warned) == 1
            assert all(decision.outcome for decision in step.explain().decisions)
            # Turned off between two steps, it forbids nothing from the next microbatch on.
            trainee.config.moe_z_loss_coeff = None
            trainee.chunks[0].zero_grad_buffer()
            forward_backward(layout, trainee, step, bind(layout, step, make_batches(1, {0, 2})))
            assert sum(not decision.outcome for decision in step.explain().decisions) == 2


def refuses_other_models() -> None:
    with pytest.raises(PruneError, match="model_chunks is empty"):
        gradprune.megatron.attach([])
    with pytest.raises(PruneError, match="model_chunks holds a str"):
        gradprune.megatron.attach(["model"])  # type: ignore[list-item]
    with trainee_of(ONE) as trainee, gradprune.megatron.attach(trainee.chunks) as schedule:
        other = build_another()
        with pytest.raises(PruneError, match=r"GPTModel .* is not one of the attached model chunks"):
            schedule.computes_loss(other)


def build_another() -> torch.nn.Module:
    from tests.megatron.layouts import _module, build_config

    return _module(ONE, build_config(ONE), 0)


def dead_forward_leaves_no_deferred_activation() -> tuple[int, int]:
    """Entries in the buffer of ``defer_embedding_wgrad_compute`` after a live and after a dead forward."""
    with trainee_of(Layout("1 rank")) as trainee, gradprune.megatron.attach(trainee.chunks) as schedule:
        model: Any = trainee.chunks[0].module
        # Its constructor would ask for the fused CUDA kernel that only the backward needs.
        model.embedding_activation_buffer = model.output_layer.embedding_activation_buffer = []
        model.output_layer.grad_output_buffer = []
        model.output_layer.config = copy.copy(trainee.config)
        model.output_layer.config.defer_embedding_wgrad_compute = True
        batch = make_batches(0, set())[0]
        counts = []
        for context in (torch.no_grad, lambda: schedule.dead_forward(model)):
            model.embedding_activation_buffer.clear()
            with torch.no_grad(), context():
                make_forward_step(Layout("1 rank"))(iter([batch]), trainee.chunks[0])
            counts.append(len(model.embedding_activation_buffer))
        return counts[0], counts[1]


def dead_microbatch_leaves_no_recomputation() -> list[tuple[bool, ...]]:
    """By microbatch, which of two layers still hold what selective recomputation would have read in the backward."""
    with trainee_of(SELECTIVE_ONE) as trainee, gradprune.megatron.attach(trainee.chunks) as schedule:
        step = gradprune.compile(make_forward_step(SELECTIVE_ONE), zero="advantages * loss_mask", schedule=schedule)
        batches = bind(SELECTIVE_ONE, step, make_batches(0, {0, 1, 2}))
        held = []
        for batch in batches[0]:
            output, loss_func = step(iter([batch]), trainee.chunks[0])
            loss_func(output)[0].backward()
            layers = trainee.chunks[0].module.decoder.layers
            held.append(tuple(layer.input_layernorm_checkpoint.ctx is not None for layer in layers))
        assert [bool(decision.outcome) for decision in step.explain().decisions] == [True, False, False, True]
        return held


@pytest.mark.timeout(120)
def test_dead_microbatch_leaves_no_recomputation(worlds):
    assert worlds(1).run(dead_microbatch_leaves_no_recomputation) == [[(False, False)] * MICROBATCHES]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", [attaches_and_detaches, refuses_by_name, refuses_other_models])
def test_attach(worlds, check):
    worlds(1).run(check)


@pytest.mark.timeout(120)
def test_dead_forward_leaves_no_deferred_activation(worlds):
    assert worlds(1).run(dead_forward_leaves_no_deferred_activation) == [(1, 0)]


def test_import_does_not_import_megatron():
    import subprocess
    import sys

    code = "import sys, gradprune.megatron, gradprune.megatron.cpu; assert 'megatron.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
