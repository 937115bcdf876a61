"""Steps whose loss or gradient is not finite: skipped on all ranks, counted, and kept for replay."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer

from dmc.training.callbacks.after_step import AfterStep
from dmc.training.checkpoints.saving import AtomicCheckpointIO, SaveLast

FOLDER_NAME = "nonfinite"
"""Folder of the kept batches, in a run's output folder."""
logger = logging.getLogger(__name__)


class NonFiniteError(ArithmeticError):
    """Too many steps in a row had a loss or gradient that is not finite; the run's state is saved."""


class NonFiniteGuard(AfterStep):
    """Skips bad steps and ends a run with too many of them in a row.

    A skipped step counts in the plan and in the order of the data, but changes neither weights nor optimizer state.

    Args:
        save_last: saves the run before it ends: with the very weights that met the bad batches.
        folder: the run's.
        most_in_a_row: skipped steps in a row after which the run ends.
    """

    def __init__(self, save_last: SaveLast, folder: Path, most_in_a_row: int) -> None:
        self.save_last, self.folder, self.most_in_a_row = save_last, folder / FOLDER_NAME, most_in_a_row
        self.skipped_steps = 0
        """Over all starts of the run."""
        self._in_a_row = 0
        self._skipped_now = False
        self._micro_batches: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Keep the count in the checkpoint."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped_steps = state_dict["skipped_steps"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Hold on to the micro-batches of the step that runs."""
        self._micro_batches.append(batch)

    def skip(self, trainer: Trainer, module: LightningModule, step: int, figures: dict[str, float]) -> None:
        """Skip a step; all ranks call this together.

        Args:
            trainer: the run's.
            module: its gradients are dropped, and its notes of the micro-batches kept.
            step: optimizer steps before it.
            figures: of the step, for the message.
        """
        module.zero_grad(set_to_none=True)  # AdamW then changes neither weights nor its state
        self.skipped_steps += 1
        self._in_a_row += 1
        self._skipped_now = True
        shown = ", ".join(f"{name.removeprefix('train/')} {value:g}" for name, value in figures.items())
        path = self.folder / file_name(step, trainer.global_rank)
        content = {"step": step, "rank": trainer.global_rank, "micro_batches": self._kept(module)}
        try:
            AtomicCheckpointIO().save_checkpoint(content, path)
            outcome = f"its batch is kept in {path}"
        except OSError as error:  # one rank that ended here would leave the others waiting
            outcome = f"its batch could not be kept: {error}"
        logger.warning("step %d is skipped (%s); %s", step, shown, outcome)

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Let the batch go; stop the run where it has skipped too many steps."""
        self._micro_batches.clear()
        if not self._skipped_now:
            self._in_a_row = 0
        self._skipped_now = False
        if self._in_a_row >= self.most_in_a_row:
            self.save_last.save(trainer, step)
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say why the run ended.

        Raises:
            NonFiniteError: it has skipped too many steps; on all ranks.
        """
        if self._in_a_row < self.most_in_a_row:
            return
        step = trainer.global_step
        file = self.folder / file_name(step - 1, trainer.global_rank)
        raise NonFiniteError(
            f"the last {self._in_a_row} steps up to step {step} had a loss or gradient that is not finite "
            f"(training.max_nonfinite_steps={self.most_in_a_row}). The last checkpoint has the weights that met them; "
            f"`python scripts/replay.py run={self.folder.parent} file={file}` shows where it starts. The same command "
            f"goes on after step {step}"
        )

    def _kept(self, module: Any) -> list[dict[str, Any]]:
        """Return the micro-batches on the CPU, each with its loss."""
        return [
            {name: value.cpu() for name, value in batch.items()} | {"loss": float(noted["train/loss"])}
            for batch, noted in zip(self._micro_batches, module.noted, strict=True)
        ]


def file_name(step: int, rank: int) -> str:
    """Name the file of a skipped step's micro-batches on one rank."""
    return f"step_{step:07d}_rank{rank}.pt"
