"""Throughput and memory of a run, and traces of a few steps."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from torch.profiler import profile, schedule, tensorboard_trace_handler

from dmc.config import RunConfig
from dmc.training.callbacks.steps import AfterStep
from dmc.training.flops import flops_per_token, peak_flops


class DataClock(Profiler):
    """Sums the time that a run waits for its data loader."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._started = 0.0

    def start(self, action_name: str) -> None:
        """Note the start of a wait."""
        if action_name.endswith("train_dataloader_next"):
            self._started = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Add the wait."""
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self._started


class Throughput(AfterStep):
    """Logs tokens per second, seconds per step and for data, the share of the device's peak, and peak memory.

    Only steps and waits for data count, not the first step of a start, validation, snapshots or saving: so this is the
    first callback. MFU is the model's operations over the peak; HFU adds the recomputed forward of activation
    checkpointing, a third of forward and backward.

    Args:
        config: the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.data_clock = config, DataClock()
        """Clock of data waits, set as the trainer's profiler."""
        self._steps = -1  # the first is a warm-up
        self._seconds = 0.0
        self._batch_started = 0.0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note the start of a micro-batch."""
        self._batch_started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Add its time."""
        self._seconds += time.perf_counter() - self._batch_started
        super().on_train_batch_end(trainer, pl_module, *arguments)

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Log at the logger's rate, over the steps since the last time."""
        self._steps += 1
        if self._steps > 0 and step % self.config.training.log_every_steps == 0:
            module: Any = pl_module
            memory = module.strategy.hosts.maximum(peak_memory(module.device))
            measured = self._measure(trainer, module) | {"train/peak_memory_gib": memory / 2**30}
            for logger in trainer.loggers:
                logger.log_metrics(measured, step=step - 1)
        elif self._steps > 0:
            return
        self._steps, self._seconds, self.data_clock.seconds = 0, 0.0, 0.0

    def _measure(self, trainer: Trainer, module: Any) -> dict[str, float]:
        training = self.config.training
        seconds = (self._seconds + self.data_clock.seconds) / self._steps
        tokens_per_second = training.tokens_per_step / seconds
        measured = {
            "train/tokens_per_second": tokens_per_second,
            "train/seconds_per_step": seconds,
            "train/data_seconds_per_step": self.data_clock.seconds / self._steps,
        }
        peak = self._peak_flops(module.device)
        if peak is not None:
            needed = flops_per_token(module.model.config, training.sequence_length) * tokens_per_second
            measured["train/mfu"] = needed / (peak * trainer.world_size)
            if training.activation_checkpointing:
                measured["train/hfu"] = measured["train/mfu"] * 4 / 3
        return measured

    def _peak_flops(self, device: torch.device) -> float | None:
        """Return one device's peak in floating-point operations per second; None: unknown."""
        settings = self.config.trainer
        if settings.peak_teraflops is not None:
            return settings.peak_teraflops * 1e12
        if device.type != "cuda":
            return None
        precision = "bf16-true" if self.config.model.dtype == "bfloat16" else settings.precision
        return peak_flops(torch.cuda.get_device_name(device), precision)


class Profile(Callback):
    """Writes one trace for each rank with torch's profiler, readable by Perfetto, chrome://tracing and TensorBoard.

    Args:
        folder: for the traces.
        wait: micro-batches before the profiler starts.
        warmup: micro-batches that it sees and forgets.
        active: micro-batches in the trace.
        record_shapes: note the shapes of operators' inputs.
        profile_memory: note what operators allocate.
        with_stack: note the lines of code.
    """

    def __init__(self, folder: str, wait: int = 2, warmup: int = 2, active: int = 4, **options: Any) -> None:
        self._folder, self._options = folder, options
        self._schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._profile: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count micro-batches."""
        handler = tensorboard_trace_handler(self._folder, worker_name=f"rank{trainer.global_rank}")
        self._profile = profile(schedule=self._schedule, on_trace_ready=handler, **self._options)
        self._profile.start()

    def on_train_batch_end(self, *_: Any) -> None:
        """Count a micro-batch; after the last of the trace it is written."""
        self._profile.step()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End an incomplete trace, also after an error."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes so far: allocated on the GPU, or resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10  # KiB on Linux
