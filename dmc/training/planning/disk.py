"""What a run writes to the disk: checkpoints, milestones, snapshots and the exported model."""

from __future__ import annotations

from dataclasses import dataclass

from dmc.training.config import RunConfig
from dmc.training.planning.peak_memory import Memory
from dmc.training.stages import Plan


@dataclass(frozen=True)
class Disk:
    """Bytes of a run's folders."""

    checkpoint: int
    """One checkpoint, or milestone: every weight (where gates alone are learned, theirs), and both of Adam's states of
    those that are trained."""
    export: int
    """One model: the last one, or a snapshot."""
    num_checkpoints: int
    """Checkpoints that are left at the end."""
    num_milestones: int
    num_snapshots: int
    largest: int
    """All of the run's folders when they are largest: the next checkpoint is written before the oldest is removed, and
    ranks that hold parts of a model write them before the first one joins them."""


def plan_disk(config: RunConfig, memory: Memory, stored: int, steps_behind: int) -> Disk:
    """Add up what a run writes.

    Args:
        config: the run.
        memory: counts its weights.
        stored: bytes of a weight.
        steps_behind: optimizer steps that a branch has behind it.
    """
    training = config.training
    plan = Plan(training, config.target_ratio, config.compression)
    total, every = plan.total_steps, training.checkpoint_every_steps
    num_saved_weights = memory.num_trained if config.learns_gates_alone(total) else memory.num_weights
    checkpoint = stored * (num_saved_weights + 2 * memory.num_trained)
    export = stored * num_saved_weights
    num_saved = total // every - steps_behind // every + (total % every > 0)
    num_milestones = sum(at > steps_behind for at in plan.ratio_steps(training.milestones.ratios).values())
    if (often := training.milestones.every_steps) is not None:
        num_milestones += total // often - steps_behind // often
    snapshots = plan.snapshot_steps(training.snapshot_ratios) if config.has_gates else {}
    num_snapshots = sum(at > steps_behind for at in snapshots.values())
    writes_parts = config.trainer.strategy in ("fsdp2", "hsdp") or config.trainer.uses_deepspeed
    ends = min(2, num_saved) * checkpoint + (2 if writes_parts else 1) * export
    largest = num_milestones * checkpoint + num_snapshots * export + max(min(3, num_saved) * checkpoint, ends)
    return Disk(checkpoint, export, min(2, num_saved), num_milestones, num_snapshots, largest)
