"""Loops over microbatches in the shapes that public GRPO code gives them, each written anew over a tiny model.

A shape is a loop and the product that names its factors. Every loop takes a `Training`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.loop.arms import ZERO, Batch, Training, batch_loss, policy_loss, token_logps


@dataclass(frozen=True)
class Shape:
    """loop: the function to decorate. zero: its factors. outcomes: of ``"dldd"``, where not the pattern itself."""

    loop: Callable[[Training], Any]
    zero: str = ZERO
    outcomes: str = "dldd"


class Engine:
    """In the manner of an engine that scales the loss and counts microbatches until it steps."""

    def __init__(self, training: Training, accumulation: int) -> None:
        self.module, self.optimizer = training.model, training.optimizer
        self.accumulation, self.count = accumulation, 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.module(ids)

    def backward(self, loss: torch.Tensor, scale: bool = True, **kwargs: Any) -> None:
        (loss / self.accumulation if scale else loss).backward(**kwargs)
        self.count += 1

    def step(self) -> None:
        if self.count % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    @contextlib.contextmanager
    def accumulate(self, model: torch.nn.Module) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def no_sync(self, enabled: bool) -> Iterator[None]:
        yield


def by_epochs(t: Training) -> None:
    """Epochs over shuffled minibatches, one optimizer step each; a loss that is not finite is skipped."""
    for epoch in range(2):
        for index, batch in enumerate(t.batches[epoch * 2 : epoch * 2 + 2]):
            batch = {name: tensor.to("cpu") for name, tensor in batch.items()}
            t.optimizer.zero_grad()
            loss = batch_loss(t.model, batch)
            if not loss.isfinite():
                t.log.append("skipped")
                continue
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), max_norm=1.0)
            t.log.append((epoch, index, loss.item(), norm))
            t.optimizer.step()


def by_accumulation(t: Training) -> float:
    """One loop over microbatches that steps every few of them, with running sums."""
    total, steps = 0.0, 0
    t.optimizer.zero_grad(set_to_none=True)
    for index, batch in enumerate(t.batches):
        loss = batch_loss(t.model, batch) / 2
        total += loss.item()
        loss.backward()
        if (index + 1) % 2 == 0:
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
            t.optimizer.step()
            t.optimizer.zero_grad(set_to_none=True)
            steps += 1
    return total / steps


class Actor:
    """A worker whose method splits minibatches into microbatches and gathers metrics."""

    def __init__(self, t: Training) -> None:
        self.actor_module, self.actor_optimizer, self.clip = t.model, t.optimizer, 0.2

    def update_policy(self, t: Training) -> None:
        self.actor_module.train()
        for mini_batch in (t.batches[:2], t.batches[2:]):
            self.actor_optimizer.zero_grad()
            for data in mini_batch:
                mask = data["mask"]
                advantages = data["adv"]
                log_prob = self._forward_micro_batch(data)
                pg_loss = policy_loss(log_prob, data["old"], advantages, mask)
                loss = pg_loss * (len(data["ids"]) / 6)
                loss.backward()
                data = {"actor/pg_loss": pg_loss.detach().item()}
                t.log.append(data)
            t.log.append(self._optimizer_step())

    def _forward_micro_batch(self, data: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return token_logps(self.actor_module, data["ids"])

    def _optimizer_step(self) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.actor_module.parameters(), max_norm=1.0)
        self.actor_optimizer.step()
        return norm


def by_worker(t: Training) -> None:
    Actor(t).update_policy(t)


def by_queue(t: Training) -> None:
    """Each step fetches its batch from a queue, sometimes in vain, and hands it to an engine."""
    engine = Engine(t, 2)
    queue = [None, *t.batches[:2], None, None, *t.batches[2:]]

    def get_batch() -> Batch | None:
        return queue.pop(0)

    def step_loss(batch: Batch) -> torch.Tensor:
        logits = engine(batch["ids"])
        rows = zip(logits[:, :-1], batch["ids"][:, 1:])
        logps = torch.stack([row.log_softmax(-1).gather(1, ids[:, None]).squeeze(1) for row, ids in rows])
        return policy_loss(logps, batch["old"], batch["adv"], batch["mask"])

    for step in range(len(t.batches)):
        batch = get_batch()
        while batch is None:
            t.log.append("waiting")
            batch = get_batch()
        loss = step_loss(batch)
        engine.backward(loss)
        engine.step()
        t.log.append(f"{step} {loss.item():.6f}")


def by_slices(t: Training) -> None:
    """Episodes in one table of tensors, cut into microbatches by position; the engine does not scale."""
    engine = Engine(t, 4)
    episodes = {name: torch.cat([batch[name] for batch in t.batches]) for name in t.batches[0]}
    size = len(t.batches[0]["ids"])
    tokens = sum(batch["mask"].sum().item() for batch in t.batches)
    for start in range(0, len(episodes["ids"]), size):
        batch = {name: value[start : start + size] for name, value in episodes.items()}
        logp = token_logps(engine.module, batch["ids"])
        ratio = torch.exp(logp - batch["old"])
        loss = -(ratio * batch["adv"][:, None] * batch["mask"]).sum() / tokens
        engine.backward(loss, scale=False)
        t.log.append(loss.item())
        del loss, logp
        engine.step()


def by_accelerator(t: Training) -> None:
    """Everything inside the accelerator's accumulation context, the optimizer's step too."""
    accelerator = Engine(t, 2)
    for batch in t.batches:
        with accelerator.accumulate(t.model):
            loss = batch_loss(t.model, batch)
            accelerator.backward(loss)
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
            accelerator.step()
            t.log.append(loss.detach())


def by_fabric(t: Training) -> None:
    """Forward and backward inside a context that switches off synchronisation."""
    fabric = Engine(t, 1)
    for index, batch in enumerate(t.batches, start=1):
        accumulating = index % 2 != 0
        with fabric.no_sync(enabled=accumulating):
            loss = batch_loss(t.model, batch)
            fabric.backward(loss / 2)
        if not accumulating:
            t.optimizer.step()
            t.optimizer.zero_grad()
        t.log.append(loss.item())


def by_scaler(t: Training) -> None:
    """Mixed precision with a gradient scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in t.batches:
        t.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = batch_loss(t.model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(t.optimizer)
        t.log.append(torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0))
        scaler.step(t.optimizer)
        scaler.update()
        t.log.append((loss.item(), scaler.get_scale()))


def by_flag(t: Training) -> None:
    """A flag chooses between a scaler and a plain backward."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for index, batch in enumerate(t.batches):
        mixed = index >= 2
        loss = batch_loss(t.model, batch)
        if mixed:
            scaler.scale(loss).backward()
            scaler.step(t.optimizer)
            scaler.update()
        else:
            loss.backward()
            t.optimizer.step()
        t.optimizer.zero_grad()


def by_iterator(t: Training) -> int:
    """A while loop that draws from an iterator and starts it again at its end."""
    source, step = iter(t.batches[:2]), 0
    while step < 4:
        try:
            batch = next(source)
        except StopIteration:
            source = iter(t.batches[2:])
            batch = next(source)
        step += 1
        loss = batch_loss(t.model, batch)
        t.optimizer.zero_grad()
        loss.backward()
        t.optimizer.step()
    return step


def by_lists(t: Training) -> None:
    """Collated tensors in parallel lists, met by index; statistics are written into a tensor."""
    ids, old, advantages, masks = ([batch[name] for batch in t.batches] for name in ("ids", "old", "adv", "mask"))
    stats = torch.zeros(len(ids), 2)
    for index in range(len(ids)):
        mb_advantages = advantages[index]
        mb_mask = masks[index]
        logp = token_logps(t.model, ids[index])
        ratio = torch.exp(logp - old[index])
        losses = torch.max(-mb_advantages[:, None] * ratio, -mb_advantages[:, None] * ratio.clamp(0.8, 1.2))
        loss = (losses * mb_mask).sum(1).div(mb_mask.sum(1).clamp(min=1)).mean()
        loss.backward()
        with torch.no_grad():
            stats[index, 0] = loss
            stats[index, 1] = (old[index] - logp).mean()
    t.optimizer.step()
    t.log.append(stats)


def by_indices(t: Training) -> None:
    """A shuffled table, cut by index arrays."""
    table = {name: torch.cat([batch[name] for batch in t.batches]) for name in t.batches[0]}
    rows = torch.arange(len(table["ids"])).view(len(t.batches), -1)
    for epoch in range(2):
        for index in range(epoch * 2, epoch * 2 + 2):
            picked = rows[index].flip(0)
            mb_adv = table["adv"][picked]
            mb_mask = table["mask"][picked]
            logp = token_logps(t.model, table["ids"][picked])
            loss = policy_loss(logp, table["old"][picked], mb_adv, mb_mask)
            t.optimizer.zero_grad()
            loss.backward()
            t.optimizer.step()
            t.log.append(loss.item())


@dataclass
class Experience:
    ids: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    action_mask: torch.Tensor

    def to(self, device: str) -> Experience:
        return replace(self, **{name: tensor.to(device) for name, tensor in vars(self).items()})


def by_experiences(t: Training) -> None:
    """Experiences from a replay buffer, moved to the device in the body, with a loss module."""
    buffer = [Experience(b["ids"], b["old"], b["adv"], b["mask"]) for b in t.batches]
    objective = _Objective()
    for experience in buffer:
        experience = experience.to("cpu")
        t.optimizer.zero_grad()
        logp = token_logps(t.model, experience.ids)
        loss, ratio = objective(logp, experience)
        loss.backward()
        t.optimizer.step()
        t.log.append((loss.item(), ratio.item()))


class _Objective(torch.nn.Module):
    def forward(self, logp: torch.Tensor, experience: Experience) -> tuple[torch.Tensor, torch.Tensor]:
        loss = policy_loss(logp, experience.old, experience.advantages, experience.action_mask)
        return loss, torch.exp(logp - experience.old).detach().mean()


def by_tuples(t: Training) -> None:
    """A data loader of tuples, each tensor moved by itself, and a stop in the middle."""
    rows = {name: torch.cat([batch[name] for batch in t.batches]) for name in ("ids", "old", "adv", "mask")}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows.values()), batch_size=3)
    for step, (ids, old_logps, batch_advantages, batch_mask) in enumerate(loader):
        ids, old_logps = ids.to("cpu"), old_logps.to("cpu")
        batch_advantages = batch_advantages.to("cpu")
        batch_mask = batch_mask.to("cpu")
        logps = token_logps(t.model, ids)
        loss = policy_loss(logps, old_logps, batch_advantages, batch_mask)
        loss = loss / 2
        loss.backward()
        if step % 2 == 1:
            t.optimizer.step()
            t.optimizer.zero_grad()
        if step == 2:
            t.log.append(loss.detach())
            break


def by_sum(t: Training) -> None:
    """The losses of a step's sequences are added up, and one backward follows."""
    for batch in t.batches:
        losses = []
        for row in range(len(batch["ids"])):
            cut = slice(row, row + 1)
            logp = token_logps(t.model, batch["ids"][cut])
            losses.append(policy_loss(logp, batch["old"][cut], batch["adv"][cut], batch["mask"][cut]))
        torch.stack(losses).mean().backward()
        t.optimizer.step()
        t.optimizer.zero_grad()
        t.log.append([loss.item() for loss in losses])


SHAPES = {
    "epochs over minibatches": Shape(by_epochs),
    "gradient accumulation": Shape(by_accumulation),
    "a batch from a queue": Shape(by_queue),
    "slices of a table": Shape(by_slices),
    "an accelerator's accumulation context": Shape(by_accelerator),
    "a fabric's no_sync context": Shape(by_fabric),
    "a gradient scaler": Shape(by_scaler),
    "a flag chooses the backward": Shape(by_flag, outcomes="dlld"),  # the third is another program, found out late
    "a while loop over an iterator": Shape(by_iterator),
    "parallel lists by index": Shape(by_lists, "mb_advantages * mb_mask"),
    "index arrays into a table": Shape(by_indices, "mb_adv * mb_mask"),
    "experiences of a replay buffer": Shape(by_experiences, "experience.advantages * experience.action_mask"),
    "tuples of a data loader": Shape(by_tuples, "batch_advantages * batch_mask", outcomes="dld"),
    "one backward for a sum of losses": Shape(by_sum),
}
