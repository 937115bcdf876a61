"""Which kernels the steps of a run launch, by torch's profiler: a callback of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

TOP = 10
STEP = "ProfilerStep"
"""Begins the names of the events that stand for whole steps."""


class KernelProfile(Callback):
    """Profiles some steps, and writes their kernels, launches and the share of the time that the device is busy.

    One more step before them is traced and dropped: compiled code is compiled anew when a profiler starts.

    Args:
        path: JSON file, written at the end of the last step.
        begin: step before which the profiler starts.
        steps: number of steps that count, from the one after `begin` on.
    """

    def __init__(self, path: str, begin: int, steps: int) -> None:
        self.path, self.begin, self.steps = Path(path), begin, steps
        self._profile: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Start at the first step."""
        if index == self.begin:
            _finish(module.device)
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (module.device.type == "cuda")
            self._profile = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=self.steps))
            self._profile.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Write after the last step."""
        if self.begin <= index < self.begin + self.steps:
            self._profile.step()
        elif index == self.begin + self.steps:
            _finish(module.device)
            self._profile.stop()
            found = summarize(self._profile.events(), module.device.type, self.steps)
            self.path.write_text(json.dumps(found, indent=1))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarize(events: Any, device: str, steps: int) -> dict[str, Any]:
    """Sum the events of a profile by kernel; on a CPU those of operators that no other one has called.

    Args:
        events: of torch's profiler.
        device: type of the device.
        steps: number of steps, for the numbers of one.
    Returns:
        `launches` and `kernel_seconds` of a step, `busy` (share of the time between the first and the last event in
        which a kernel runs), and the `top` kernels by time, each with its name, share of all kernels' time, and calls.
    """
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    kernels = [
        event
        for event in events
        if event.device_type == kind
        and not event.name.startswith(STEP)
        and (device == "cuda" or event.cpu_parent is None or event.cpu_parent.name.startswith(STEP))
    ]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    seconds: dict[str, list[float]] = {}
    for event in kernels:
        seconds.setdefault(event.name, []).append((event.time_range.end - event.time_range.start) / 1e6)
    total = sum(map(sum, seconds.values()))
    longest = sorted(seconds, key=lambda name: -sum(seconds[name]))[:TOP]
    return {
        "launches": len(kernels) / steps,
        "kernel_seconds": total / steps,
        "busy": busy / max(until - spans[0][0], 1e-9),
        "top": [
            {"name": name, "share": sum(seconds[name]) / total, "calls": len(seconds[name]) / steps} for name in longest
        ],
    }
