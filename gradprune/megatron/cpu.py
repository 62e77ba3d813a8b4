"""Real megatron-core on a CPU over gloo, for development and tests: no GPU, TransformerEngine, Apex or triton kernel.

megatron-core asks for CUDA devices, streams and generators by name even where it could do without. `emulate_cuda`
answers those requests with the CPU while it is open, and puts everything back when it closes. Nothing happens at
import. Never use it for training that matters: it makes ``device="cuda"`` mean the CPU for the whole thread.

Tried with megatron-core 0.16.1 and 0.19.2, torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradprune.patching import replaced

CPU = torch.device("cpu")
_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


@contextmanager
def emulate_cuda() -> Iterator[None]:
    """While open, megatron-core runs on the CPU in this thread. Raises RuntimeError where CUDA is there to be used.

    Build models with ``use_cpu_initialization=True`` and without fusions, seed with
    ``model_parallel_cuda_manual_seed``, and pass a short ``distributed_timeout_minutes`` to
    ``initialize_model_parallel``: megatron's groups do not take the time-out of ``init_process_group``.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "emulate_cuda: this machine has a CUDA device; run megatron on it, or hide it with CUDA_VISIBLE_DEVICES=''"
        )
    with ExitStack() as undo:
        for owner, name, value in _device_substitutes():
            undo.enter_context(replaced(owner, name, value))
        for owner, name, value in _megatron_substitutes():
            undo.enter_context(replaced(owner, name, value))
        undo.enter_context(torch.compiler.set_stance("force_eager"))  # megatron's jit_fuser is torch.compile
        undo.enter_context(_CpuForCuda())
        yield


class _CpuForCuda(TorchFunctionMode):
    """Factories and ``Tensor.to``: a CUDA device means the CPU, and no memory is pinned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        result = func(*args, **kwargs)
        # Megatron's optimizers check ``tensor.type()`` against CUDA type names; nobody else is told so.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _asked_by_megatron():
            return _CUDA_TYPE_NAMES.get(result, result)
        return result


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _asked_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


class _Stream:
    """A CUDA stream or event on a device that runs everything in order: there is never anything to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def record_event(self, event: Any = None) -> _Stream:
        return _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _device_substitutes() -> list[tuple[Any, str, Any]]:
    """What torch.cuda and tensors answer: one device, the CPU, its generator, and streams that are always done."""

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def nothing(*args: Any, **kwargs: Any) -> None: ...
    def itself(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    return [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "get_rng_state", get_rng_state),
        (torch.cuda.random, "get_rng_state", get_rng_state),
        (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
        (torch.cuda, "stream", lambda stream=None: stream if stream is not None else _Stream()),
        (torch.Tensor, "cuda", itself),
        (torch.Tensor, "record_stream", nothing),
        (torch.nn.Module, "cuda", itself),
    ]


def _megatron_substitutes() -> list[tuple[Any, str, Any]]:
    """Places where megatron-core itself needs CUDA or TransformerEngine without a way around; each with its reason."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    new_norm = torch_norm.WrappedTorchNorm.__new__

    def norm_under_sequence_parallelism(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        with replaced(config, "sequence_parallel", False):
            module = new_norm(cls, config, *args, **kwargs)
        for parameter in module.parameters():  # finalize_model_grads reduces what is tagged so over the TP group
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module

    checkpoint_init = random.CheckpointWithoutOutput.__init__

    def init_without_fp8(self: Any, *args: Any, **kwargs: Any) -> None:
        checkpoint_init(self, *args, **kwargs)
        self.fp8 = False

    return [
        # torch._C has no CUDA generator here
        (random, "_set_cuda_rng_state", set_rng_state),
        # 0.16.1 sets fp8 to ``False is not None``, and then asks TransformerEngine
        (random.CheckpointWithoutOutput, "__init__", init_without_fp8),
        # 0.16.1 tests this name without having defined it when TransformerEngine is absent
        (moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None)),
        # converts split sizes to numpy only if they lie on a GPU; all_to_all then refuses the tensor
        (token_dispatcher, "maybe_move_tensor_to_cpu", split_sizes),
        # refuses sequence parallelism, although a replicated norm with tagged weights is all that it takes
        (torch_norm.WrappedTorchNorm, "__new__", norm_under_sequence_parallelism),
    ]
