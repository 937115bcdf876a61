"""Checkpoints written beside their place and renamed, and when they are written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from dmc.training.callbacks.after_step import AfterStep
from dmc.training.checkpoints.folder import could_not_be_written
from dmc.training.checkpoints.generations import LAST_CHECKPOINT, Generations


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it, so that a kill or a full disk leaves the one before."""

    def __init__(self) -> None:
        self._generations = Generations()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            OSError: it could not be written; what was at `path` is still there.
        """
        target = Path(str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            self._generations.promote(partial, target)
        except (OSError, RuntimeError) as error:
            raise could_not_be_written(target, error) from error
        finally:
            partial.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint as Lightning does."""
        checkpoint = super().load_checkpoint(path, *arguments, **options)
        self._generations.known(Path(str(path)))
        return checkpoint


class SaveLast(AfterStep):
    """Saves `last.ckpt` every so many optimizer steps, and at the last one.

    Args:
        folder: where the checkpoint lies.
        every_steps: optimizer steps between two.
    """

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.folder, self.every_steps = folder, every_steps
        self._saved_step = -1

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Save after a step whose turn it is."""
        if step % self.every_steps == 0 or step == trainer.max_steps:
            self.save(trainer, step)

    def save(self, trainer: Trainer, step: int) -> None:
        """Save now, unless this step is saved; rank 0 writes and all wait."""
        if step != self._saved_step:
            self._saved_step = step
            trainer.save_checkpoint(self.folder / LAST_CHECKPOINT, weights_only=False)
