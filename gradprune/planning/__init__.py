"""The parts of `gradprune.planner`: reading a rollout, packing, balancing over ranks, binding a plan to batches."""
