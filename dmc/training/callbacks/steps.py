"""Callbacks that act on optimizer steps, or count them."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class AfterStep(Callback):
    """Acts once after each optimizer step, not between micro-batches, nor on the step that a run resumes from."""

    _seen_step = 0

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Act after `step` optimizer steps."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting at the restored step."""
        self._seen_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Call `after_step` if the step has changed."""
        if trainer.global_step != self._seen_step:
            self._seen_step = trainer.global_step
            self.after_step(trainer, pl_module, self._seen_step)


class StepProgress(Callback):
    """Recounts the micro-batches of a checkpoint's optimizer steps for this start's division of the batch.

    Lightning counts micro-batches and steps at multiples of a step's count, so that a count made with other
    micro-batches or devices, or within a step, would shift every later step, and end the run early.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the progress of whole steps into the checkpoint that Lightning restores."""
        step = checkpoint["global_step"]
        done = dict.fromkeys(("ready", "started", "processed", "completed"), step * trainer.accumulate_grad_batches)
        loop = checkpoint["loops"]["fit_loop"]
        loop["epoch_loop.batch_progress"] = {"total": done, "current": dict(done), "is_last_batch": False}
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step  # the loggers' count
