"""What a dead microbatch leaves behind besides numbers: zeros instead of None, hooks, modes, the caller's faults."""

from __future__ import annotations

import pytest
import torch

import gradprune
from gradprune.errors import NoEffectWarning
from tests.step.arms import TinyModel, make_batch
from tests.step.losses import Loss, grpo


def compiled_step(step=None, **options):
    return gradprune.compile(step or Loss(grpo), zero="adv * mask", **options)


def forward_modules(monkeypatch, model):
    """Counts backward work inside the model by hooks on its layers."""
    seen = []
    for name in ("embed", "mix", "norm", "head"):
        getattr(model, name).register_full_backward_hook(lambda *_, name=name: seen.append(name))
    return seen


@pytest.mark.parametrize("dead", [True, False])
def test_prunes_backward_of_model_and_keeps_live_one(monkeypatch, dead):
    model, step = TinyModel(), compiled_step()
    seen = forward_modules(monkeypatch, model)
    for seed in range(3):
        loss, _ = step(model, make_batch(4, 6, dead=dead, seed=seed))
        loss.backward()
    assert (seen == []) == dead


def test_prunes_saved_activations():
    """The second dead microbatch keeps nothing of the model's forward alive."""
    model, step = TinyModel(), compiled_step()
    saved = []
    for seed in range(2):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            step(model, make_batch(4, 6, dead=True, seed=seed))
    hidden = (4, 7, 8)
    assert hidden not in saved
    assert saved, "the loss's own backward is run, up to the model's output"


def test_prunes_to_zeros_not_to_none():
    model, step = TinyModel(), compiled_step()
    for seed in range(2):
        model.zero_grad()
        loss, _ = step(model, make_batch(4, 6, dead=True, seed=seed))
        loss.backward()
        for name, parameter in model.named_parameters():
            if name == "unused":
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("dead", [True, False])
def test_fires_parameter_hooks(dead):
    """Optimizer-in-backward lives on these hooks: they get a tensor, never None, as often as unpruned."""
    model, step, fired = TinyModel(), compiled_step(), []
    model.mix.weight.register_hook(lambda gradient: fired.append(("hook", gradient.shape)))
    model.mix.weight.register_post_accumulate_grad_hook(lambda p: fired.append(("post", p.grad.shape)))
    for seed in range(3):
        step(model, make_batch(4, 6, dead=dead, seed=seed))[0].backward()
    assert fired == [("hook", (8, 8)), ("post", (8, 8))] * 3


def test_keeps_frozen_parameters_without_gradient():
    model, step = TinyModel(), compiled_step()
    model.embed.requires_grad_(False)
    for seed in range(2):
        step(model, make_batch(4, 6, dead=True, seed=seed))[0].backward()
    assert model.embed.weight.grad is None
    assert model.mix.weight.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_no_microbatch(mode):
    def step(model, batch):
        logp = model(batch["ids"]).log_softmax(-1)[..., 0]
        return logp.sum() if "adv" not in batch else (logp * batch["adv"][:, None]).sum()

    model, pruned = TinyModel().eval(), compiled_step(step)
    batch = make_batch(4, 6, dead=True, seed=2)
    for dead in (True, False):
        pruned(model, make_batch(4, 6, dead=dead, seed=0)).backward()
    decided, report = len(pruned.explain().decisions), pruned.report()
    unlabelled = {"ids": batch["ids"]}  # what a rollout is scored from has no advantages yet
    with mode():
        assert torch.equal(pruned(model, batch), step(model, batch))
        assert torch.equal(pruned(model, unlabelled), step(model, unlabelled))
    assert len(pruned.explain().decisions) == decided == 2 and pruned.report() == report


@pytest.mark.parametrize("fault", [RuntimeError("out of coffee"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", ["model", "loss"])
def test_restores_everything_after_a_fault(fault, place):
    model, armed = TinyModel(), []

    def step(model, batch):
        loss, metrics = Loss(grpo)(model, batch)
        if armed and place == "loss":
            raise fault
        return loss, metrics

    def strike(*_):
        if armed and place == "model":
            raise fault

    model.mix.register_forward_hook(strike)
    pruned = compiled_step(step)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    apply = torch.autograd.Function.__dict__["apply"]
    for warm in (False, True):
        armed.clear()
        if warm:
            pruned(model, make_batch(4, 6, dead=True, seed=0))
        armed.append(True)
        with pytest.raises(type(fault)):
            pruned(model, make_batch(4, 6, dead=True, seed=1))
        assert torch.is_grad_enabled()
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
        assert torch.autograd.Function.__dict__["apply"] is apply
        assert torch.overrides._get_current_function_mode() is None
    armed.clear()
    loss, _ = pruned(model, make_batch(4, 6, dead=True, seed=2))
    loss.backward()


def test_keeps_step_that_cannot_be_proved_and_says_so_once():
    model, step = TinyModel(), compiled_step(lambda model, batch: model(batch["ids"]).mean() + batch["adv"].sum())
    with pytest.warns(NoEffectWarning) as caught:
        for seed in range(3):
            step(model, make_batch(4, 6, dead=True, seed=seed)).backward()
    assert len(caught) == 1
    assert "test_contract.py" in str(caught[0].message)
    assert "not proved" in str(step.explain())


def test_strict_raises_where_nothing_can_be_pruned():
    step = compiled_step(lambda model, batch: model(batch["ids"]).mean(), strict=True)
    with pytest.raises(gradprune.PruneError, match="strict: refused"):
        step(TinyModel(), make_batch(4, 6, dead=True, seed=0))


def test_report_adds_up_and_counts_what_was_pruned():
    model, step = TinyModel(), compiled_step()
    for seed, dead in enumerate((False, True, True)):
        step(model, make_batch(4, 6, dead=dead, seed=seed))[0].backward()
    report = step.report()
    assert (report.microbatches_live, report.microbatches_dead) == (1, 2)
    assert report.live_pruned.total == 0
    assert report.dead_run.backward == 0
    assert report.dead_pruned.backward == 2 * report.live_run.backward > 0
    assert report.total == report.run.total + report.pruned.total
