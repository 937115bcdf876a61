"""Steps whose loss or gradient is not finite: skipped on all ranks, counted, and kept for replay."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor

from dmc.training.callbacks.steps import AfterStep
from dmc.training.checkpoints.saving import SaveLast, write_aside

FOLDER_NAME = "nonfinite"
"""Folder of the kept batches, in a run's output folder."""
logger = logging.getLogger(__name__)


class NonFiniteError(ArithmeticError):
    """Too many steps in a row had a loss or gradient that is not finite; the run's state is saved."""


class NonFiniteGuard(AfterStep):
    """Skips bad steps and ends a run with too many of them in a row.

    A skipped step counts in the plan and in the order of the data, but changes neither weights nor optimizer state. It
    is skipped on the device; the host hears of it a step later. Once too many were bad in a row the device skips all
    that follow until the host has stopped the run.

    Args:
        save_last: saves the run before it ends: with the very weights that met the bad batches.
        folder: the run's.
        most_in_a_row: skipped steps in a row after which the run ends.
    """

    def __init__(self, save_last: SaveLast, folder: Path, most_in_a_row: int) -> None:
        self.save_last, self.folder, self.most_in_a_row = save_last, folder / FOLDER_NAME, most_in_a_row
        self.skipped_steps: int | Tensor = 0
        """Over all starts of the run."""
        self._bad_in_a_row: int | Tensor = 0  # the device's count
        self._noted_in_a_row = 0  # the host's
        self._last_bad = 0
        self._micro_batches: list[dict[str, Any]] = []
        self._unnoted: dict[int, tuple[list[dict[str, Any]], list[Tensor]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Keep the count in the checkpoint."""
        return {"skipped_steps": int(self.skipped_steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped_steps = state_dict["skipped_steps"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Hold on to the micro-batches of the step that runs."""
        self._micro_batches.append(batch)

    def judge(self, step: int, figures: Tensor, noted: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Decide on the device whether a step is skipped, from figures that are the same on all ranks.

        Args:
            step: optimizer steps before it.
            figures: of the step.
            noted: figures of its micro-batches.
        Returns:
            Whether it is, and how many are by then.
        """
        is_bad = ~figures.isfinite().all() | (self._bad_in_a_row >= self.most_in_a_row)
        self._bad_in_a_row = (self._bad_in_a_row + 1) * is_bad
        self.skipped_steps = self.skipped_steps + is_bad
        self._unnoted[step] = self._micro_batches, [each["train/loss"] for each in noted]
        self._micro_batches = []
        return is_bad, self.skipped_steps

    def note(self, trainer: Trainer, step: int, is_skipped: bool, figures: dict[str, float]) -> None:
        """Learn what became of a step; all ranks call this together.

        Args:
            trainer: the run's.
            step: the one that `judge` was asked about.
            is_skipped: its answer.
            figures: of the step, for the message.
        """
        micro_batches, losses = self._unnoted.pop(step)
        if self._noted_in_a_row >= self.most_in_a_row:
            return  # whatever it was, it was skipped
        self._noted_in_a_row = self._noted_in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        self._last_bad = step
        shown = ", ".join(f"{name.removeprefix('train/')} {value:g}" for name, value in figures.items())
        path = self.folder / file_name(step, trainer.global_rank)
        kept = [_kept(batch, loss) for batch, loss in zip(micro_batches, losses, strict=True)]
        content = {"step": step, "rank": trainer.global_rank, "micro_batches": kept}
        try:
            write_aside(content, path)
            outcome = f"its batch is kept in {path}"
        except OSError as error:  # one rank that ended here would leave the others waiting
            outcome = f"its batch could not be kept: {error}"
        logger.warning("step %d is skipped (%s); %s", step, shown, outcome)

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Stop the run where it has skipped too many steps."""
        if self._noted_in_a_row >= self.most_in_a_row:
            self.save_last.save(trainer, step)
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say why the run ended.

        Raises:
            NonFiniteError: it has skipped too many steps; on all ranks.
        """
        if self._noted_in_a_row < self.most_in_a_row:
            return
        file = self.folder / file_name(self._last_bad, trainer.global_rank)
        raise NonFiniteError(
            f"the last {self._noted_in_a_row} steps up to step {self._last_bad + 1} had a loss or gradient that is not "
            f"finite (training.max_nonfinite_steps={self.most_in_a_row}). The last checkpoint has the weights that met "
            f"them; `python scripts/replay.py run={self.folder.parent} file={file}` shows where it starts. The same "
            f"command goes on after step {trainer.global_step}"
        )


def _kept(batch: dict[str, Any], loss: Tensor) -> dict[str, Any]:
    """Return what a replay needs of a micro-batch, on the CPU, with its loss."""
    tensors = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)}
    if batch.get("documents") is not None:
        tensors["document_starts"] = batch["documents"].starts.cpu()
    return tensors | {"position": torch.tensor(batch["position"]), "loss": float(loss)}


def file_name(step: int, rank: int) -> str:
    """Name the file of a skipped step's micro-batches on one rank."""
    return f"step_{step:07d}_rank{rank}.pt"
