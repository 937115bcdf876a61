"""Throughput and memory of a run.

Lightning's `ThroughputMonitor` does not serve here: it times everything since the start (see
`test_speed_counts_steps_and_waits_for_data_and_nothing_else`), and waits for the device after each step, which is to
have the next one queued by then.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from lightning import LightningModule, Trainer

from dmc.training.after_step import AfterStep
from dmc.training.config import RunConfig
from dmc.training.flops import peak_flops, run_flops_per_token
from dmc.training.optimizer_step import OptimizerStep


class Throughput(AfterStep):
    """Logs tokens per second, seconds per step and for data, the share of the device's peak, and peak memory.

    Only steps and waits for data count, not the first step of a start, validation, snapshots or saving: so this is the
    first callback. MFU is the model's operations over the peak.

    Args:
        config: the run.
        optimizer_step: takes its steps.
    """

    def __init__(self, config: RunConfig, optimizer_step: OptimizerStep) -> None:
        self.config, self.optimizer_step = config, optimizer_step
        self._steps = -1  # the first is a warm-up
        self._seconds = self._data_seconds = 0.0
        self._batch_started = self._flops = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Note the start of a step; between it and the end of the one before the run has waited for data."""
        self._batch_started = time.perf_counter()
        self._data_seconds += self._batch_started - self.optimizer_step.ended

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Add its time."""
        self._seconds += time.perf_counter() - self._batch_started
        super().on_train_batch_end(trainer, pl_module, *arguments)

    def after_step(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Log at the logger's rate, over the steps since the last time."""
        self._steps += 1
        if self._steps > 0 and step % self.config.training.log_every_steps == 0:
            memory = pl_module.strategy.hosts.all_reduce(peak_memory(pl_module.device), "max")
            measured = self._measure(trainer, pl_module) | {"train/peak_memory_gib": memory / 2**30}
            for logger in trainer.loggers:
                logger.log_metrics(measured, step=step - 1)
        elif self._steps > 0:
            return
        self._steps, self._seconds, self._data_seconds = 0, 0.0, 0.0

    def _measure(self, trainer: Trainer, module: Any) -> dict[str, float]:
        training = self.config.training
        seconds = (self._seconds + self._data_seconds) / self._steps
        tokens_per_second = training.tokens_per_step / seconds
        measured = {
            "train/tokens_per_second": tokens_per_second,
            "train/seconds_per_step": seconds,
            "train/data_seconds_per_step": self._data_seconds / self._steps,
        }
        peak = self._peak_flops(module.device)
        if peak is not None:
            self._flops = self._flops or run_flops_per_token(self.config, module.model.config)
            measured["train/mfu"] = self._flops * tokens_per_second / (peak * trainer.world_size)
        return measured

    def _peak_flops(self, device: torch.device) -> float | None:
        """Return one device's peak in floating-point operations per second; None: unknown."""
        settings = self.config.trainer
        if settings.peak_teraflops is not None:
            return settings.peak_teraflops * 1e12
        if device.type != "cuda":
            return None
        precision = "bf16-true" if self.config.dtype == "bfloat16" else settings.precision
        return peak_flops(torch.cuda.get_device_name(device), precision)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes so far: allocated on the GPU, or resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10  # KiB on Linux
