"""emulate_cuda() answers for a CUDA device while it is open, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from gradprune.megatron import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="refuses to run where a CUDA device is")


def names() -> dict[str, object]:
    watched = [(torch.cuda, "torch.cuda"), (torch.Tensor, "Tensor"), (torch.nn.Module, "Module")]
    return {f"{label}.{name}": value for owner, label in watched for name, value in vars(owner).items()}


def test_means_the_cpu_while_open():
    with cpu.emulate_cuda():
        made = [
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0], device=torch.device("cuda", 0)),
            torch.ones(2).to("cuda"),
            torch.ones(2).cuda(),
            torch.empty(2, pin_memory=True),
            torch.zeros(1, device=torch.cuda.current_device()),
        ]
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
        torch.cuda.manual_seed(3)
        drawn, state = torch.rand(2), torch.cuda.get_rng_state()
        assert torch.equal(state, torch.get_rng_state())
    assert all(tensor.device.type == "cpu" for tensor in made)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))


def test_leaves_nothing_behind():
    with cpu.emulate_cuda():  # the first use imports megatron, which sets up things of its own
        pass
    before = names()
    with pytest.raises(ZeroDivisionError), cpu.emulate_cuda():
        assert names() != before
        1 / 0  # noqa: B018
    after = names()
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_tells_only_megatron_of_cuda_types():
    with cpu.emulate_cuda():
        assert torch.zeros(1).type() == "torch.FloatTensor"
        asked = eval("tensor.type()", {"__name__": "megatron.core.optimizer", "tensor": torch.zeros(1)})
        assert asked == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_refuses_a_real_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this machine has a CUDA device"), cpu.emulate_cuda():
        pass
