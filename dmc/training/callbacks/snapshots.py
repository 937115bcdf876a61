"""Ready-to-use models at chosen ratios along the ramp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning import LightningModule, Trainer

from dmc.training.callbacks.after_step import AfterStep


class Snapshots(AfterStep):
    """Exports a ready-to-use model whenever the ramp has reached a chosen ratio.

    Args:
        ratio_at_step: optimizer steps and the ratio reached after each.
        export: called with the model and the ratio.
    """

    def __init__(self, ratio_at_step: dict[int, float], export: Callable[[Any, float], None]) -> None:
        self.ratio_at_step, self.export = ratio_at_step, export

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Export after a step that reached a ratio; all ranks wait for it."""
        if step in self.ratio_at_step:
            self.export(pl_module.model, self.ratio_at_step[step])
            trainer.strategy.barrier("snapshot")
