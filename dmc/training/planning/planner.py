"""The plan of a run: memory of each rank, tokens, steps, disk, without loading a weight or starting anything.

Memory is that of a step on tensors without data (`fake_step.py`). Times are not measured: what holds them is named
`assumed`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

import torch

from dmc.budget import sequence_ratio
from dmc.compression.full_attention import layer_windows
from dmc.training.config import PlannerConfig, RunConfig
from dmc.training.flops import peak_flops, run_flops_per_token
from dmc.training.planning.disk import Disk, plan_disk
from dmc.training.planning.peak_memory import Memory, plan_memory
from dmc.training.planning.proposal import Proposal, propose
from dmc.training.planning.start_checks import check_start, model_shape
from dmc.training.stages import Plan
from dmc.training.strategies.devices import devices_per_node

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Devices that a plan assumes."""

    name: str
    memory_gib: float
    is_gpu: bool
    source: str
    """Source of name and memory."""

    @classmethod
    def of(cls, config: RunConfig, planner: PlannerConfig) -> Device:
        """Return this machine's device, or an assumed one."""
        if config.trainer.accelerator == "cpu":
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / devices_per_node(config)
            return cls("CPU", planner.device_memory_gib or memory, False, "this machine, shared by its ranks")
        if torch.cuda.is_available() and planner.device is None:
            properties = torch.cuda.get_device_properties(0)
            memory = planner.device_memory_gib or properties.total_memory / GIB
            return cls(properties.name, memory, True, "this machine's GPU")
        is_given = planner.device is not None and planner.device_memory_gib is not None
        return cls(
            planner.device or planner.assumed_device,
            planner.device_memory_gib or planner.assumed_memory_gib,
            True,
            "given" if is_given else "assumed: set planner.device and planner.device_memory_gib",
        )


@dataclass(frozen=True)
class StagePlan:
    """Length of one stage."""

    name: str
    steps: int
    """Optimizer steps."""
    tokens: int


@dataclass(frozen=True)
class TrainingPlan:
    """Requirements of a run."""

    model: str
    num_weights: int
    strategy: str
    num_devices: int
    data_parallel_size: int
    tensor_parallel_size: int
    context_parallel_size: int
    device: Device
    memory: Memory
    """Memory of each rank."""
    host_bytes: int
    """CPU memory of the first node: offloaded states, and whole copies of the weights: one for each rank while they are
    loaded, or, where each rank reads its own part of a base, two when the first rank exports and checks."""
    micro_batches: int
    """Forward passes of each rank for one optimizer step."""
    micro_batch_size: int
    tokens_per_step: int
    stages: list[StagePlan]
    steps: int
    """Optimizer steps of the run."""
    target_ratio: float
    """Compression ratio of the layers that can be compressed."""
    sequence_ratio: float
    """That of all keys and values at the end of a training sequence, those of windows included."""
    flops_per_step: float
    """Floating-point operations of an optimizer step, on all devices."""
    assumed_utilization: float
    """Share of the data sheet's peak that is reached, `planner.utilization`."""
    assumed_step_seconds: float | None
    """FLOPs of a step / (devices * peak * assumed utilization); None: the device's peak is not known."""
    assumed_hours: float | None
    """Of all steps."""
    assumed_gpu_hours: float | None
    disk: Disk

    def refuse_what_does_not_fit(self, config: RunConfig) -> None:
        """Raise ValueError, with the largest component and advice, if a device has not enough memory."""
        if self.memory.total <= self.device.memory_gib * GIB:
            return
        name, size = max(self.memory.components.items(), key=lambda item: item[1])
        raise ValueError(
            f"a rank needs {self.memory.total / GIB:.1f} GiB, {self.device.name} has {self.device.memory_gib:.1f} GiB "
            f"({self.device.source}); the largest part is {name}, {size / GIB:.1f} GiB: try {_advice(name, config)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with memory as components in bytes."""
        memory = self.memory
        sums = {"total": memory.total, "in CPU memory": memory.cpu, "by formula": memory.formulas}
        return {**dataclasses.asdict(self), "memory": {**memory.components, **sums}}


def _advice(largest: str, config: RunConfig) -> str:
    if largest in ("weights", "gradients", "optimizer states", "teacher"):
        if config.trainer.strategy in ("fsdp2", "hsdp", "deepspeed_zero3"):
            return "more nodes (trainer.num_nodes), or trainer=deepspeed_zero3_offload"
        return "a strategy that divides all states among the ranks: trainer=fsdp2 on more than one device"
    if largest in ("gradients on their way", "sums and temporaries") and config.trainer.accumulate_locally:
        return "trainer.accumulate_locally=false, by which gradients are divided after each micro-batch"
    if largest in ("gathered weights", "gradients on their way", "buckets"):
        return "a larger trainer.tensor_parallel_size with trainer=fsdp2, or more memory for each device"
    if largest in ("activations", "sums and temporaries") and not config.training.activation_checkpointing:
        return "training.activation_checkpointing=true, or a smaller training.micro_batch_size"
    return (
        "a smaller training.micro_batch_size or sequence_length, or a larger trainer.context_parallel_size with fsdp2"
    )


def plan_training(config: RunConfig, planner: PlannerConfig) -> TrainingPlan:
    """Plan a run; writes nothing, and needs no network where the model's shape is a folder's or the YAML's.

    Raises:
        ValueError, NotImplementedError: the number of devices is not known; or the start would be refused, see
            `check_start`.
    """
    trainer, training = config.trainer, config.training
    num_local = devices_per_node(config)
    num_devices, cuts = num_local * trainer.num_nodes, trainer.devices_per_sequence
    check_start(config, num_local)
    model = model_shape(config)
    micro_batches = training.accumulation(num_devices // cuts)
    plan = Plan(training, config.target_ratio, config.compression)
    # A branch has the ramp behind it; its milestone may be yet to come.
    behind = 0 if training.branch_from is None else plan.ratio_steps([config.target_ratio])[config.target_ratio]
    lengths = plan.lengths(behind)
    device = Device.of(config, planner)
    memory = plan_memory(config, num_devices // cuts, device.is_gpu)
    stored = 2 if config.dtype == "bfloat16" else 4
    stages = [StagePlan(name, steps, steps * training.tokens_per_step) for name, steps in lengths]
    reads_parts = trainer.strategy in ("fsdp2", "hsdp", "deepspeed_zero3") and config.model is not None
    copies = 2 if reads_parts else num_local
    peak = peak_flops(device.name, "bf16" if stored == 2 else trainer.precision)
    flops_per_step = run_flops_per_token(config, model) * training.tokens_per_step
    step_seconds = None if peak is None else flops_per_step / (num_devices * peak * planner.utilization)
    steps = sum(stage.steps for stage in stages)
    hours = None if step_seconds is None else step_seconds * steps / 3600
    return TrainingPlan(
        model=config.model or f"fresh {model.model_type}",
        num_weights=memory.num_weights,
        strategy=trainer.strategy,
        num_devices=num_devices,
        data_parallel_size=num_devices // cuts,
        tensor_parallel_size=trainer.tensor_parallel_size,
        context_parallel_size=trainer.context_parallel_size,
        device=device,
        memory=memory,
        host_bytes=num_local * memory.cpu + copies * stored * memory.num_weights,
        micro_batches=micro_batches,
        micro_batch_size=training.micro_batch_size,
        tokens_per_step=training.tokens_per_step,
        stages=stages,
        steps=steps,
        target_ratio=config.target_ratio,
        sequence_ratio=sequence_ratio(config.target_ratio, training.sequence_length, layer_windows(model)),
        flops_per_step=flops_per_step,
        assumed_utilization=planner.utilization,
        assumed_step_seconds=step_seconds,
        assumed_hours=hours,
        assumed_gpu_hours=None if hours is None else hours * num_devices,
        disk=plan_disk(config, memory, stored, behind),
    )


def print_plan(config: RunConfig, planner: PlannerConfig, as_json: bool = False) -> None:
    """Print the plan of a run.

    Raises:
        ValueError: see `plan_training`; or, once it is printed, a device has not enough memory for it.
    """
    plan = plan_training(config, planner)
    better = propose_settings(config, plan)
    if as_json:
        proposal = None if better is None else {"settings": better.settings, "total": better.memory.total}
        print(json.dumps({**plan.to_dict(), "better": proposal}, indent=2), flush=True)
    else:
        print("\n".join([plan_table(plan), *([] if better is None else [proposal_line(better, plan)])]), flush=True)
    plan.refuse_what_does_not_fit(config)


def propose_settings(config: RunConfig, plan: TrainingPlan) -> Proposal | None:
    """Find better settings for the GPUs of a plan; None: there are none, or the run is a CPU's."""
    if not plan.device.is_gpu:
        return None

    def measure(other: RunConfig) -> Memory:
        return plan_memory(other, plan.data_parallel_size, on_gpu=True)

    num_local = devices_per_node(config)
    return propose(config, num_local, plan.device.memory_gib * GIB, plan.memory, measure)


def proposal_line(better: Proposal, plan: TrainingPlan) -> str:
    """Say what would be better, in one line."""
    name = "gathers" if plan.strategy in ("fsdp2", "hsdp", "deepspeed_zero3") else "passes"
    peak = f"peak {better.memory.total / GIB:.1f} of {plan.device.memory_gib:.1f} GiB"
    return (
        f"better: {' '.join(better.settings)} ({peak}, {better.passes} {name} a step instead of {plan.micro_batches}; "
        "by assumed rates)"
    )


def plan_table(plan: TrainingPlan) -> str:
    """Format a plan as text."""
    device, memory = plan.device, plan.memory
    spread = f"{plan.data_parallel_size} data parallel x {plan.tensor_parallel_size} tensor parallel"
    if plan.context_parallel_size > 1:
        spread += f" x {plan.context_parallel_size} context parallel"
    lines = [
        f"{plan.model}: {plan.num_weights:,} weights; {plan.strategy} on {plan.num_devices} x {device.name}, {spread}",
        f"memory of each rank in GiB at its peak, {memory.peak}:",
        *(
            f"  {name:<26}{size / GIB:9.2f}{'  by a formula' if name in memory.formulas else ''}"
            for name, size in memory.components.items()
        ),
        f"  {'total':<26}{memory.total / GIB:9.2f}  of {device.memory_gib:.1f} ({device.source})",
        f"CPU memory of the first node: {plan.host_bytes / GIB:,.1f} GiB",
        *_disk_lines(plan.disk),
        f"step: {plan.tokens_per_step:,} tokens, on each rank {plan.micro_batches} micro-batch"
        f"{'' if plan.micro_batches == 1 else 'es'} of {plan.micro_batch_size} sequences",
        *(f"  {stage.name:<12}{stage.steps:9,} steps {stage.tokens:19,} tokens" for stage in plan.stages),
        f"  {'total':<12}{plan.steps:9,} steps {sum(stage.tokens for stage in plan.stages):19,} tokens",
    ]
    if plan.sequence_ratio != plan.target_ratio:
        lines.append(
            f"cache: CR {plan.target_ratio:g} of the layers that attend to all tokens, "
            f"{plan.sequence_ratio:.2f} of all keys and values of a training sequence"
        )
    time = f"time: {plan.flops_per_step:.2g} FLOPs a step; "
    if plan.assumed_step_seconds is None:
        time += f"the peak of {device.name} is not known"
    else:
        time += f"assumed, at {plan.assumed_utilization:.0%} of the data sheet's peak (planner.utilization): "
        time += f"{plan.assumed_step_seconds:,.1f} s a step, {plan.assumed_hours:,.1f} hours, "
        time += f"{plan.assumed_gpu_hours:,.0f} GPU-hours, without validation, initialization and export"
    return "\n".join([*lines, time])


def _disk_lines(disk: Disk) -> list[str]:
    written = [f"{disk.num_checkpoints} checkpoints of {_size(disk.checkpoint)}"]
    written += [f"{disk.num_milestones} milestones"] if disk.num_milestones else []
    written += [f"{disk.num_snapshots} snapshots"] if disk.num_snapshots else []
    written.append(f"the model of {_size(disk.export)}")
    return [f"disk: {', '.join(written)}; at most {_size(disk.largest)} while it writes"]


def _size(num_bytes: int) -> str:
    """Write bytes in GiB, or those of gates alone in MiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"
