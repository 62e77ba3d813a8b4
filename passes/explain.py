"""Why a gradient is not proved zero: the lines through which it flows."""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx

from gradprune.facts import Reason
from gradprune.passes.flow import Flow


def reasons(
    flow: Flow, gradients: Mapping[str, torch.fx.Node | None], names: Mapping[torch.fx.Node, str]
) -> tuple[Reason, ...]:
    return (Reason("live-term", "gradient may flow", None),)
