"""AReaL: its actor losses on padded batches."""

from __future__ import annotations

from pathlib import Path

from tests.peers.loaders import Loss
from tests.peers.sandbox import Sandbox

DISTRIBUTION = "areal"
FILE = "areal.utils.functional.functional"


def losses(root: Path) -> dict[str, Loss]:
    module = Sandbox(root, ("areal",), (FILE,)).load(FILE)

    def ppo(logp, old, adv, mask, ref):
        clip = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 3.0}
        return module.ppo_actor_loss_fn(logp, old, old, adv, loss_mask=mask.bool(), **clip)[0]

    def ppo_sequence(logp, old, adv, mask, ref):
        clip = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "importance_sampling_level": "sequence"}
        return module.ppo_actor_loss_fn(logp, old, old, adv, loss_mask=mask.bool(), **clip)[0]

    def sapo(logp, old, adv, mask, ref):
        return module.sapo_loss_fn(logp, old, adv, tau_pos=1.0, tau_neg=1.05, loss_mask=mask.bool())[0]

    return {"areal/ppo": ppo, "areal/ppo_sequence": ppo_sequence, "areal/sapo": sapo}
