"""Every layout and every pattern of dead microbatches; as a program, writes the table of a whole run.

python -m tests.megatron.matrix table.md
python -m tests.megatron.matrix table.md --device cuda    the layouts of `ON_GPUS`: bf16, NCCL, a GPU for each rank
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import megatron.core
import torch

from gradprune.runtime.attempts import TRIAL
from tests.megatron.arms import Dead, Outcome, compare_arms, parse_dead
from tests.megatron.layouts import MICROBATCHES, Layout
from tests.megatron.world import RankError, World

OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
EXPERT_BIAS = dict(
    **EXPERTS,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
    moe_router_bias_update_rate=0.1,
)
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
NO_BIAS = {"add_bias_linear": False}

#: Small enough for every run of the test suite, and at least one layout for each remedy.
CORE = (
    Layout("1 rank, full recompute, dropout", config={**FULL, **DROPOUT}),
    Layout("1 rank, selective recompute", config={**SELECTIVE, **NO_BIAS}),
    Layout("DP2", 2),
    Layout("DP2, overlap", 2, ddp=OVERLAP),
    Layout("DP2, distributed optimizer, overlap, per-token loss", 2, ddp=SHARDED, per_token=True),
    Layout("TP2, SP", 2, tp=2, config={"sequence_parallel": True}),
    Layout("PP2, overlap, outputs deallocated", 2, pp=2, ddp=OVERLAP, config={"deallocate_pipeline_outputs": True}),
    Layout("PP2, VPP2, overlap", 2, pp=2, vpp=2, ddp=OVERLAP),
    Layout("PP2, overlap, bf16", 2, pp=2, ddp=OVERLAP, dtype=torch.bfloat16),
    Layout("CP2, packed", 2, cp=2, packed=True),
    Layout("EP2, expert bias, overlap", 2, ep=2, ddp=OVERLAP, config=EXPERT_BIAS),
)
REST = (
    Layout("1 rank", per_token=True),
    Layout("1 rank, overlap", ddp=OVERLAP),
    Layout("1 rank, dropout", config=DROPOUT),
    Layout("1 rank, MLPs trained, the rest frozen", frozen=True),
    Layout("1 rank, packed", packed=True),
    Layout("1 rank, experts", config=EXPERTS),
    Layout("DP2, distributed optimizer", 2, ddp={"use_distributed_optimizer": True}),
    Layout("DP2, distributed optimizer, parameters gathered late", 2, ddp=dict(**SHARDED, overlap_param_gather=True)),
    Layout("DP2, frozen, overlap", 2, frozen=True, ddp=OVERLAP),
    Layout("DP2, full recompute, dropout, overlap", 2, ddp=OVERLAP, config={**FULL, **DROPOUT}),
    Layout("DP2, expert bias, full recompute", 2, config={**EXPERT_BIAS, **FULL}),
    Layout("TP2", 2, tp=2),
    Layout("TP2, overlap, dropout", 2, tp=2, ddp=OVERLAP, config=DROPOUT),
    Layout("PP2", 2, pp=2),
    Layout("PP2, untied, per-token loss", 2, pp=2, tied=False, per_token=True),
    Layout("PP2, full recompute", 2, pp=2, config=FULL),
    Layout("PP2, packed", 2, pp=2, packed=True),
    Layout("PP2, experts", 2, pp=2, config=EXPERTS),
    Layout("PP2, VPP2", 2, pp=2, vpp=2),
    Layout("CP2", 2, cp=2),
    Layout("CP2, per-token loss, overlap", 2, cp=2, per_token=True, ddp=OVERLAP),
    Layout("EP2", 2, ep=2, config=EXPERTS),
    Layout("EP2, gathered tokens", 2, ep=2, config={**EXPERTS, "moe_token_dispatcher_type": "allgather"}),
    Layout("EP2, expert bias", 2, ep=2, config=EXPERT_BIAS),
    Layout(
        "TP2, PP2, full recompute, saved activations distributed",
        4,
        tp=2,
        pp=2,
        config={**FULL, "distribute_saved_activations": True},
    ),
    Layout("TP2, SP, PP2, overlap", 4, tp=2, pp=2, ddp=OVERLAP, config={"sequence_parallel": True}),
    Layout("PP2, EP2", 4, pp=2, ep=2, config=EXPERTS),
    Layout("PP2, EP2, expert bias, overlap", 4, pp=2, ep=2, ddp=OVERLAP, config=EXPERT_BIAS),
    Layout("DP2, PP2, overlap", 4, pp=2, ddp=OVERLAP),
    Layout("DP2, overlap, bf16", 2, ddp=OVERLAP, dtype=torch.bfloat16),
    Layout("DP2, distributed optimizer, overlap, bf16", 2, ddp=SHARDED, dtype=torch.bfloat16),
    Layout("DP2, distributed optimizer, overlap, fp16", 2, ddp=SHARDED, dtype=torch.float16),
    Layout("PP2, VPP2, selective recompute, overlap", 2, pp=2, vpp=2, ddp=OVERLAP, config={**SELECTIVE, **NO_BIAS}),
    Layout("1 rank, fp16, the first steps overflow", dtype=torch.float16, loss_scale=2.0**32),
)

#: Two GPUs are enough for each; sequence parallelism needs TransformerEngine's norm there.
ON_GPUS = tuple(
    replace(layout, dtype=torch.bfloat16)
    for layout in (
        Layout("1 rank, full recompute, dropout", config={**FULL, **DROPOUT}),
        Layout("DP2, overlap", 2, ddp=OVERLAP),
        Layout("DP2, distributed optimizer, overlap, per-token loss", 2, ddp=SHARDED, per_token=True),
        Layout(
            "DP2, distributed optimizer, parameters gathered late", 2, ddp={**SHARDED, "overlap_param_gather": True}
        ),
        Layout("TP2", 2, tp=2),
        Layout("TP2, overlap, dropout", 2, tp=2, ddp=OVERLAP, config=DROPOUT),
        Layout("PP2, overlap, outputs deallocated", 2, pp=2, ddp=OVERLAP, config={"deallocate_pipeline_outputs": True}),
        Layout("PP2, VPP2, overlap", 2, pp=2, vpp=2, ddp=OVERLAP),
        Layout("CP2", 2, cp=2),
        Layout("CP2, packed", 2, cp=2, packed=True),
        Layout("EP2, overlap", 2, ep=2, ddp=OVERLAP, config=EXPERTS),
        Layout("EP2, expert bias, overlap", 2, ep=2, ddp=OVERLAP, config=EXPERT_BIAS),
    )
)

#: Steps separated by ``;``, data-parallel ranks by ``|``; a layout of one data rank takes the first.
PATTERNS = {
    "none": "|;|;|;|;|",
    "some": "0,2|1;1|0,2;0,2|0;2|1,2;0|2",
    "last": "|;3|;|3;3|3;2,3|3",
    "all of one rank": "|;0,1,2,3|;|0,1,2,3;0,1,2,3|2;1|0,1,2,3",
    "all": "0,1,2,3|0,1,2,3;0,1,2,3|0,1,2,3;0|0;0,1,2,3|0,1,2,3;3|3",
    "mixed": "0,2|0,2;3|0,2;0,1,2,3|1;0,1,2,3|0,1,2,3;|;0,3|1,3",
}


def expected_dead(layout: Layout, dead: Dead, rank: int, tried: bool) -> int:
    """How many forward steps rank `rank` is to run dead, with one chunk or all of its chunks. tried: its first dead
    microbatch was a trial."""
    stage = rank // (layout.world // layout.pp)
    data_rank = (rank % (layout.world // layout.pp)) // (layout.tp * layout.cp)
    counts = []
    for step, now in enumerate(dead):
        # Expert-parallel ranks prune what is dead on all of them.
        mine = set.intersection(*now[: layout.data_ranks]) if layout.ep > 1 else now[data_rank]
        # With overlap, the first step is live: it shows the order of the reductions.
        counts.append(0 if step == 0 and layout.ddp.get("overlap_grad_reduce") else len(mine))
    first = next((step for step, count in enumerate(counts) if count), len(counts))
    elsewhere = sum(counts[first + 1 :])
    if tried and layout.tp * layout.cp * layout.ep > 1:
        on_loss_stage = elsewhere  # ranks confirm to each other at the next agreement that the trial was passed
    else:
        # The last of several stages watches its first dead microbatch live: the stage before waits for a gradient.
        on_loss_stage = max(sum(counts) - (tried or layout.pp > 1), 0)
    last = stage == layout.pp - 1
    # Other stages hear of the proof at the next agreement.
    return (on_loss_stage if last else elsewhere) + elsewhere * ((layout.vpp or 1) - 1)


def check(layout: Layout, dead: Dead, outcomes: list[Outcome]) -> None:
    """Raises AssertionError unless every rank is bit-equal and pruned exactly what it should."""
    passes = len(dead) * MICROBATCHES * (layout.vpp or 1)
    for rank, outcome in enumerate(outcomes):
        where = f"{layout.name}, rank {rank}"
        assert not outcome.differences, f"{where}: {len(outcome.differences)} differ, first {outcome.differences[:5]}"
        expected = expected_dead(layout, dead, rank, tried=TRIAL in outcome.reasons)
        assert outcome.dead == expected, f"{where}: {outcome.dead} dead; {outcome.reasons}"
        assert outcome.backwards == passes, f"{where}: {outcome.backwards} backwards unpruned"
        assert outcome.backwards_pruned == passes - outcome.dead, f"{where}: {outcome.backwards_pruned} backwards"


def main() -> int:
    """Run every layout under every pattern; write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--first", type=int, default=0, help="number of the layout to start from")
    args = parser.parse_args()
    on_gpus = args.device == "cuda"
    where = f"{torch.cuda.get_device_name()}, NCCL, bf16, deterministic" if on_gpus else "CPU, gloo"
    lines = [
        f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, {where}: `torch.equal` of every",
        "`main_grad` of every step, and after the last step of parameters, buffers, optimizer state, random state;",
        "losses and gradient norms of every step. Each cell: forward steps of all ranks whose backward was pruned.",
        "",
        "| layout | ranks | " + " | ".join(PATTERNS) + " | seconds |",
        "|---|---|" + "---|" * (len(PATTERNS) + 1),
    ]
    failed = 0
    for layout in (ON_GPUS if on_gpus else (*CORE, *REST))[args.first :]:
        start, cells = time.perf_counter(), []
        world = World(layout.world, args.device)  # a fresh one: groups that were destroyed leave threads behind
        for text in PATTERNS.values():
            dead = parse_dead(text)
            try:
                outcomes = world.run(compare_arms, layout, dead, limit=600)
                check(layout, dead, outcomes)
                cells.append(f"equal, {sum(o.dead for o in outcomes)}/{sum(o.backwards for o in outcomes)}")
            except (AssertionError, RankError) as error:
                failed += 1
                cells.append("FAILED")
                print(f"{layout.name}, {text}: {error}", file=sys.stderr, flush=True)
        world.close()
        row = [layout.name, str(layout.world), *cells, f"{time.perf_counter() - start:.0f}"]
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
        args.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
