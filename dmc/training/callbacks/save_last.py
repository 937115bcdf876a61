"""Saves checkpoints along a run: the last ones, and milestones that are kept."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer

from dmc.training.after_step import AfterStep
from dmc.training.checkpoints import MILESTONES_NAME, step_name


class SaveLast(AfterStep):
    """Saves a checkpoint every `every_steps` optimizer steps and at the last one, and milestones.

    Args:
        folder: of the last checkpoints; milestones lie beside it.
        every_steps: optimizer steps between two.
        milestones: name of a milestone -> step after which it is kept.
        milestones_every: optimizer steps between two more milestones, which have the names of their steps; None: none.
    """

    def __init__(
        self,
        folder: Path,
        every_steps: int,
        milestones: dict[str, int] | None = None,
        milestones_every: int | None = None,
    ) -> None:
        self.folder, self.every_steps = folder, every_steps
        self.milestones, self.milestones_every = milestones or {}, milestones_every

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Start saving if the step is due."""
        names = [name for name, at in self.milestones.items() if at == step]
        names += [step_name(step)] if self.milestones_every and step % self.milestones_every == 0 else []
        for name in names:
            milestone = self.folder.with_name(MILESTONES_NAME) / name
            if not trainer.strategy.broadcast(milestone.exists()):  # a step that was done twice
                trainer.save_checkpoint(milestone, weights_only=False)
        if step % self.every_steps == 0 or step == trainer.max_steps or trainer.should_stop:
            self._begin(trainer, step)

    def save(self, trainer: Trainer, step: int) -> None:
        """Save now, unless this step is saved, and wait until it is on disk."""
        self._begin(trainer, step)
        self.teardown(trainer)

    def teardown(self, trainer: Any, pl_module: Any = None, stage: str = "fit") -> None:
        """Wait for the last checkpoint."""
        trainer.strategy.saver.wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish the checkpoint that is being written, if possible."""
        with suppress(OSError, RuntimeError):  # RuntimeError: another rank is gone
            self.teardown(trainer)

    def _begin(self, trainer: Trainer, step: int) -> None:
        trainer.save_checkpoint(self.folder / step_name(step), weights_only=False)
