"""A run that goes on from a milestone on another one's ramp: one ramp serves every ratio that it passes."""

from __future__ import annotations

from pathlib import Path

from dmc.config import RunConfig
from dmc.training.checkpoints.folder import read_header
from dmc.training.record import changed_settings, read_config
from dmc.training.stages import Plan

OWN = (
    "compression.target_ratio", "training.branch_from", "training.stages", "training.delays",
    "training.snapshot_ratios", "training.checkpoint_every_steps",
)  # fmt: skip
"""Settings that a branch has for itself; what they say of the steps that it shares must be the same."""


def check_branch(config: RunConfig, plan: Plan) -> int:
    """Check that the run would have taken the very steps that lie behind the milestone; return how many.

    Raises:
        FileNotFoundError: there is no milestone, or no run around it.
        ValueError: the two differ before it, or the milestone comes after the run's last step.
    """
    milestone = Path(str(config.training.branch_from))
    steps = read_header(milestone).global_step
    source = milestone.parent.parent
    known = read_config(source)
    if changed := changed_settings(known, config, OWN):
        raise ValueError(
            f"training.branch_from={milestone}: its run has other settings ({changed}); a branch is what a run from "
            "the start would have come to: give it the same"
        )
    if steps >= plan.total_steps:
        raise ValueError(
            f"training.branch_from={milestone} lies after step {steps}, this run ends after {plan.total_steps}: take "
            "an earlier milestone, or a higher compression.target_ratio"
        )
    theirs = Plan(known.training, known.target_ratio, known.compression)
    for step in range(steps):
        if theirs.at(step) != plan.at(step):
            raise ValueError(
                f"training.branch_from={milestone} lies after step {steps}, and step {step} of its run was another: "
                f"{theirs.at(step)} there, {plan.at(step)} here; give training.stages as there, and to a ramp by steps "
                f"training.stages.retrofit.ramp_to={known.target_ratio:g} in both; compression.target_ratio is the "
                "milestone's"
            )
    return steps
