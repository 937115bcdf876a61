"""A plan as text for people, and as JSON for programs."""

from __future__ import annotations

import json

from dmc.config import PlannerConfig, RunConfig
from dmc.training.planning.planner import GIB, TrainingPlan, plan_training


def print_plan(config: RunConfig, planner: PlannerConfig, as_json: bool = False) -> None:
    """Print the plan of a run.

    Raises:
        ValueError: see `plan_training`; or, once it is printed, a device has not enough memory for it.
    """
    plan = plan_training(config, planner)
    print(json.dumps(plan.to_dict(), indent=2) if as_json else plan_table(plan), flush=True)
    plan.refuse_what_does_not_fit()


def plan_table(plan: TrainingPlan) -> str:
    """Lay a plan out in lines."""
    device, memory = plan.device, plan.memory
    spread = f"{plan.data_parallel_size} data parallel x {plan.tensor_parallel_size} tensor parallel"
    lines = [
        f"{plan.model}: {plan.num_weights:,} weights; {plan.strategy} on {plan.num_devices} x {device.name}, {spread}",
        f"memory of each rank in GiB at its peak, {memory.peak}:",
        *(f"  {name:<26}{size / GIB:9.2f}" for name, size in memory.components.items() if size),
        f"  {'total':<26}{memory.total / GIB:9.2f}  of {device.memory_gib:.1f} ({device.source})",
        f"CPU memory of the first node: {plan.host_bytes / GIB:,.1f} GiB",
        f"checkpoint: {plan.checkpoint_bytes / GIB:,.1f} GiB, twice on the disk",
        f"step: {plan.tokens_per_step:,} tokens, {plan.micro_batches} x {plan.micro_batch_size} sequences per rank",
        *(f"  {stage.name:<12}{stage.steps:9,} steps {stage.tokens:19,} tokens" for stage in plan.stages),
        f"  {'total':<12}{plan.steps:9,} steps {sum(stage.tokens for stage in plan.stages):19,} tokens",
    ]
    if plan.gpu_hours is None or plan.days is None:
        return "\n".join([*lines, f"time: not known, for the peak of {device.name} is not"])
    assumed = f"at an assumed {plan.utilisation:.0%} of the peak"
    return "\n".join([*lines, f"time: {plan.gpu_hours:,.0f} GPU-hours, {plan.days:,.1f} days, {assumed}"])
