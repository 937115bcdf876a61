"""Where the time of a few steps goes, as traces."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch.profiler import profile, schedule, tensorboard_trace_handler


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
        """End a trace that is not full, also after an error."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
