"""Progress bar with the metrics that the host has read."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

SHOWN = ("train/loss", "train/target_ratio", "train/achieved_ratio", "train/decided_ratio")


class StepProgressBar(TQDMProgressBar):
    """Shows some metrics of the last step that the host has read."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Add them to Lightning's metrics."""
        latest: dict[str, float] = pl_module.optimization.latest  # type: ignore[assignment, union-attr]
        shown: dict[str, Any] = {name: latest[name] for name in SHOWN if name in latest}
        return {**super().get_metrics(trainer, pl_module), **shown}
