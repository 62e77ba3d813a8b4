"""How long ``prove()`` takes on a loss with clips and metrics, in a new process: ``python -m tests.passes.speed``."""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import torch  # noqa: E402

LOADED = time.perf_counter()

import gradprune.proof  # noqa: E402
from gradprune.facts import Verdict  # noqa: E402

IMPORTED = time.perf_counter()


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def loss(logp, old, adv, mask, entropy):
    """Dual clip, with the metrics that trainers log."""
    gap = torch.clamp(logp - old, -20, 20)
    ratio = torch.exp(gap)
    first, second = -adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.28)
    clipped = torch.maximum(first, second)
    policy = torch.where(adv < 0, torch.min(-adv * 3.0, clipped), clipped)
    metrics = {
        "gap": masked_mean(-gap, mask).detach().item(),
        "clipped": masked_mean((second > first).float(), mask).item(),
        "entropy": masked_mean(entropy, mask).item(),
    }
    return masked_mean(policy, mask), metrics


def main() -> None:
    analyse, spent = gradprune.proof.analyse, 0.0

    def timed(*args, **kwargs) -> Verdict:
        nonlocal spent
        start = time.perf_counter()
        verdict = analyse(*args, **kwargs)
        spent += time.perf_counter() - start
        return verdict

    gradprune.proof.analyse = timed
    print(f"import torch {LOADED - STARTED:.2f} s, import gradprune {IMPORTED - LOADED:.2f} s")
    for turn in ("first", "second", "third"):
        spent, start = 0.0, time.perf_counter()
        verdict = gradprune.proof.prove(loss, [torch.randn(8, 128)] * 5, zero="adv * mask", wrt="logp")
        assert verdict
        print(f"{turn} prove() {time.perf_counter() - start:.2f} s, of which analysis {spent:.3f} s")


if __name__ == "__main__":
    main()
