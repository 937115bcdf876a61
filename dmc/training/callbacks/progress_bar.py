"""Progress bar with the metrics that the host has read."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from dmc.training.optimizer_step import OptimizerStep

SHOWN = ("train/loss", "train/target_ratio", "train/achieved_ratio", "train/decided_ratio")


class StepProgressBar(TQDMProgressBar):
    """Shows some metrics of the last step that the host has read.

    Args:
        optimizer_step: takes the run's steps.
        refresh_rate: steps between two updates.
    """

    def __init__(self, optimizer_step: OptimizerStep, refresh_rate: int) -> None:
        super().__init__(refresh_rate)
        self.optimizer_step = optimizer_step

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Add them to Lightning's metrics."""
        latest = self.optimizer_step.latest
        shown: dict[str, Any] = {name: latest[name] for name in SHOWN if name in latest}
        others = super().get_metrics(trainer, pl_module)
        others.pop("v_num", None)  # the number of a log
        return {**others, **shown}

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Name what it shows: a run has one epoch."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description("train")
