"""Peak memory of one rank in a step, by torch's trackers on a step with fake tensors.

Formulas are used only where no tracker works: DeepSpeed's states and buffers, and its memory on the host. Validation
needs less than the step's own forward.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from dmc.training.config import RunConfig
from dmc.training.layer_kinds import layer_kinds
from dmc.training.planning.fake_step import fake_step
from dmc.training.planning.start_checks import model_shape

ENDS, SHARDED_ENDS = 1, 2
"""First and last layers that are traced; the neighbors of the very first and last are gathered or reduced meanwhile."""
NAMES = {
    "Parameter": "weights", "Sharded Param": "weights", "Buffer": "weights",
    "Gradient": "gradients", "Sharded Grad": "gradients",
    "Optstate": "optimizer states", "OptState": "optimizer states",
    "Other": "teacher", "Inputs": "teacher",
    "Unsharded Param": "gathered weights", "All Gather": "gathered weights",
    "Unsharded Grad": "gradients on their way", "Reduce Scatter": "gradients on their way",
    "Activation": "activations", "Temp": "sums and temporaries",
}  # fmt: skip
"""What the trackers count, in words of a plan. Made in a backward are temporaries, and what is summed until a step
ends: whole gradients with `accumulate_locally`, those of a copy with HSDP."""
DEEPSPEED_BUCKET = 200_000_000
"""Weights in one of DeepSpeed's buffers: Lightning's reduce_bucket_size and allgather_bucket_size."""
DEEPSPEED_LIVE = 1_000_000_000
"""Maximum weights that ZeRO-3 keeps gathered: DeepSpeed's stage3_max_live_parameters."""
CONTEXT_BYTES = int(1.5 * 2**30)
"""CUDA context, cuBLAS workspaces and NCCL's buffers: 1 to 2 GiB on current GPUs."""
FRAGMENTED = 0.05
"""Share of the memory reserved by PyTorch's allocator that no tensor uses."""


@dataclass(frozen=True)
class Memory:
    """Memory of one rank at its peak, in bytes."""

    components: dict[str, int]
    """Bytes on the device, by component."""
    peak: str
    """Moment of the peak."""
    num_weights: int
    """Weights of the model, over all ranks."""
    num_trained: int
    """Those of them that the optimizer has states of."""
    formulas: tuple[str, ...] = ()
    """Components by formula, which were not traced."""
    cpu: int = 0
    """Bytes of offloaded states in CPU memory."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.components.values())


def plan_memory(config: RunConfig, num_ranks: int, on_gpu: bool) -> Memory:
    """Find the moment of peak memory in a step, and its components.

    Args:
        config: the run.
        num_ranks: data parallel ranks.
        on_gpu: whether the device is a GPU.
    """
    peaks, num_weights, num_trained = trace(without_deepspeed(config), config.training.accumulation(num_ranks))
    cpu, formulas = 0, []
    if config.trainer.uses_deepspeed:
        states, cpu = _zero_states(config, num_weights, num_ranks)
        formulas = [*states, "update of the weights"]
        peaks["update of the weights"] = {"update of the weights": states.pop("update of the weights")}
        peaks = {moment: {**counted, **states} for moment, counted in peaks.items()}
    peak = max(peaks, key=lambda moment: sum(peaks[moment].values()))
    components = {name: size for name, size in peaks[peak].items() if size}
    if on_gpu:
        components["context, fragmentation"] = CONTEXT_BYTES + round(FRAGMENTED * sum(components.values()))
        formulas.append("context, fragmentation")
    found = tuple(name for name in components if name in formulas)
    return Memory(components, peak, num_weights, num_trained, found, cpu)


def without_deepspeed(config: RunConfig) -> RunConfig:
    """Give a run that has the activations of DeepSpeed's on one device: bf16-mixed computes with bfloat16 weights."""
    if not config.trainer.uses_deepspeed:
        return config
    trainer = dataclasses.replace(
        config.trainer, strategy="auto", devices=1, num_nodes=1, precision="32-true", offload_optimizer=False,
        offload_parameters=False,
    )  # fmt: skip
    dtype = "bfloat16" if config.trainer.precision == "bf16-mixed" else config.dtype
    return dataclasses.replace(config, trainer=trainer, dtype=dtype)


def trace(config: RunConfig, micro_batches: int) -> tuple[dict[str, dict[str, int]], int, int]:
    """Count the memory at each moment of a step, the model's weights, and those that are trained.

    Each moment's peak, and each of its components, is linear in the number of layers of each kind. So the first layers,
    the last ones and the last of each kind are traced, and once more with one more layer of each kind that is left.

    Args:
        config: of a run without DeepSpeed.
        micro_batches: of a step.
    """
    kinds, ends = layer_kinds(model_shape(config)), ENDS if config.trainer.strategy in ("auto", "ddp") else SHARDED_ENDS
    everywhere = range(len(kinds))
    last_of_kinds = {kind: number for number, kind in enumerate(kinds)}.values()
    traced = sorted({*everywhere[:ends], *everywhere[-ends:], *last_of_kinds})
    left: dict[str, list[int]] = {}
    for number in sorted({*everywhere} - {*traced}):
        left.setdefault(kinds[number], []).append(number)
    if sum(map(len, left.values())) <= len(left):
        return _trace_layers(config, list(everywhere), micro_batches)
    peaks, *counts = _trace_layers(config, traced, micro_batches)
    sums = {moment: Counter(counted) for moment, counted in peaks.items()}
    num_weights, num_trained = counts
    for numbers in left.values():
        more, *more_counts = _trace_layers(config, sorted([*traced, numbers[0]]), micro_batches)
        for moment, counted in peaks.items():
            for name, size in counted.items():
                sums[moment][name] += (more[moment][name] - size) * len(numbers)
        num_weights += (more_counts[0] - counts[0]) * len(numbers)
        num_trained += (more_counts[1] - counts[1]) * len(numbers)
    return {moment: dict(counted) for moment, counted in sums.items()}, num_weights, num_trained


def _trace_layers(
    config: RunConfig, layers: Sequence[int], micro_batches: int
) -> tuple[dict[str, dict[str, int]], int, int]:
    with fake_step(config, layers) as step:
        module, model = step.module, step.module.model
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        step.strategy.set_tensors(lambda _: None)  # the optimizer's states
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        taught = module.teacher
        others = [] if taught is None or not taught.owns_weights else [taught.model]
        teacher = [parameter for other in others for parameter in other.parameters()]
        tracker: Any
        if step.strategy.holds_parts:
            tracker = FSDPMemTracker(model, step.optimizer)
            tracker.track_inputs(teacher)
        else:
            for part in (model, *others):
                _frozen_as_buffers(part)  # the tracker listens to the gradients of all parameters
            tracker = TrackerOfAll()
            tracker.track_external(model, step.optimizer)
        if step.strategy.mesh_shape[2] > 1:
            step.micro_batch()  # DTensor tries an operation once on tensors of the whole shape, which are none here
        peaks = Peaks(tracker, model, layers)
        if taught is not None and not taught.owns_weights:
            taught.read = _apart(taught.read, peaks)  # type: ignore[method-assign]
        count = min(micro_batches, 2)  # the last one needs most; where ranks hold parts, the first leaves buffers to it
        with tracker:
            for index in range(0 if step.strategy.holds_parts else count - 1, count):
                peaks.begin("forward")
                step.micro_batch(is_first=index == 0, is_last=index + 1 == count)
                tracker.reset_mod_stats()
            peaks.begin("")
        if not step.strategy.holds_parts:
            for counted in peaks.counted.values():
                counted["teacher"] = sum(parameter.nbytes for parameter in teacher)
                counted["weights"] -= counted["teacher"]
        return peaks.counted, num_weights, num_trained


def _apart(read: Callable[..., Any], peaks: Peaks) -> Callable[..., Any]:
    """Let a teacher that is the student read in a forward pass that the tracker does not take for the student's."""

    def reading(*arguments: Any) -> Any:
        found = read(*arguments)
        peaks.tracker.reset_mod_stats()
        peaks.begin("forward")
        return found

    return reading


def _frozen_as_buffers(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(part, name)
                part.register_buffer(name, parameter.detach())


class TrackerOfAll(MemTracker):
    """Keeps no peaks of single modules, which take a third of the time."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        modules, self.memory_tracking = self.memory_tracking, type(self.memory_tracking)()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules


class Peaks:
    """Takes down, for each moment of a step, what a tracker counts when it counts most.

    Args:
        tracker: torch's.
        model: whose layers tell the moments.
        numbers: of these layers in the whole model.
    """

    def __init__(self, tracker: MemTracker, model: Any, numbers: Sequence[int]) -> None:
        self.counted: dict[str, dict[str, int]] = {}
        self.tracker, self._moment = tracker, ""
        for number, layer in zip(numbers, model.model.layers, strict=True):
            self._at_gradient_of(layer, f"backward of layer {number}")
        model.model.norm.register_forward_pre_hook(lambda *_: self.begin("logits and loss"))
        self._at_gradient_of(model.model.embed_tokens, "backward of the embedding")

    def begin(self, moment: str) -> None:
        """End a moment and begin another."""
        counts: dict[Any, dict[Any, int]] = self.tracker.get_tracker_snapshot("peak")
        for counted in counts.values():
            named = dict.fromkeys(NAMES.values(), 0)
            for kind, size in counted.items():
                if kind != "Total":
                    named[NAMES[kind.value]] += size
            before = self.counted.get(self._moment, {})
            self.counted[self._moment] = max(before, named, key=lambda sizes: sum(sizes.values()))
        self.tracker._peak_mem.clear()  # the new moment has a peak of its own
        self._moment = moment

    def _at_gradient_of(self, part: nn.Module, moment: str) -> None:
        def listen(_: Any, __: Any, output: Any) -> None:
            states = output if isinstance(output, torch.Tensor) else output[0]
            if states.requires_grad:
                states.register_hook(lambda _: self.begin(moment))

        part.register_forward_hook(listen)


def _zero_states(config: RunConfig, num_weights: int, num_ranks: int) -> tuple[dict[str, int], int]:
    """Compute what DeepSpeed holds on a device and on the CPU, for each rank.

    With P weights of c bytes on N ranks. ZeRO-1: c P weights, c P gradients, 12 P / N optimizer (float32 weights and
    both of Adam's states). ZeRO-2: c P / N gradients. ZeRO-3: c P / N weights too. Two buckets of 2e8 weights, c bytes
    each; ZeRO-3 keeps c bytes of at most 1e9 gathered weights. The update makes float32 gradients, 4 P / N.
    """
    trainer, stage = config.trainer, int(config.trainer.strategy[-1])
    size = 2 if without_deepspeed(config).dtype == "bfloat16" else 4
    sharded = -(-num_weights // num_ranks)
    states = {
        "weights": size * (sharded if stage == 3 else num_weights),
        "gradients": size * (sharded if stage > 1 else num_weights),
        "optimizer states": 12 * sharded,
        "buckets": 2 * size * min(DEEPSPEED_BUCKET, num_weights),
        "gathered weights": size * min(DEEPSPEED_LIVE, num_weights) if stage == 3 else 0,
        "update of the weights": 4 * sharded,
    }
    cpu = 0
    if trainer.offload_optimizer:  # DeepSpeed then sums the gradients there too
        cpu += states["optimizer states"] + states["update of the weights"]
        states |= {"optimizer states": 0, "update of the weights": 0}
    if trainer.offload_parameters:
        cpu += states["weights"]
        states["weights"] = 0
    return states, cpu
