"""GRPO on a real Megatron GPT, pruned and unpruned side by side, on a CPU in about two minutes.

    python examples/megatron_grpo/main.py

A short supervised warm-up, then updates on answers that the model samples itself. Every update runs twice from the
same state on the same rollout; one bit of difference ends the demo with exit code 1 and the name of the tensor.
"""

from __future__ import annotations

import sys
import warnings

from gradprune.megatron import cpu


def main() -> int:
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # no TransformerEngine, no Apex
    with cpu.emulate_cuda():
        import train  # imports megatron, which warns at import

        return train.run()


if __name__ == "__main__":
    sys.exit(main())
