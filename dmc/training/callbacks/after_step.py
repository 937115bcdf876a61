"""Callbacks that act on optimizer steps."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class AfterStep(Callback):
    """Acts once after each optimizer step: not between its micro-batches, nor on the step that a run resumes from."""

    _seen_step = 0

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Act; `step` optimizer steps are done."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting at the restored step."""
        self._seen_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Call `after_step` where the step has changed."""
        if trainer.global_step != self._seen_step:
            self._seen_step = trainer.global_step
            self.after_step(trainer, pl_module, self._seen_step)
