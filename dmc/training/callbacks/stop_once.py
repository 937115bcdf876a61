"""Stops a run on purpose, to see it go on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from lightning import LightningModule, Trainer

from dmc.training.after_step import AfterStep

SAVED_NAME = "stop_once.json"
"""File in the run's folder: after how many steps it was stopped, and how long saving took."""


class StopOnce(AfterStep):
    """Stops a run by SIGTERM to its last rank, upon which all ranks save and exit; the next start goes on.

    Args:
        step: number of optimizer steps after which the signal comes; a start that goes on from there gets none.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._stopped_at: float | None = None

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Send the signal when the step is done; saving comes after this callback."""
        if step == self.step:
            self._stopped_at = time.perf_counter()
            if trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write down how long saving took."""
        if self._stopped_at is not None and trainer.is_global_zero:
            saved = {"step": self.step, "seconds": time.perf_counter() - self._stopped_at}
            (Path(trainer.default_root_dir) / SAVED_NAME).write_text(json.dumps(saved) + "\n")
