"""Base of the callbacks that act after optimizer steps."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class AfterStep(Callback):
    """Acts after each optimizer step: a batch of Lightning's is one, see `StepLoader`."""

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Act after `step` optimizer steps."""
        raise NotImplementedError

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Call `after_step`."""
        self.after_step(trainer, pl_module, trainer.global_step)
