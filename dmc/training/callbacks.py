"""What happens along a run: speed and memory, validation with a heatmap, snapshots at chosen ratios."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from dmc.measure import TextScore, score_text
from dmc.training.after_step import AfterStep
from dmc.training.heatmap import draw_ratio_heatmap


class Throughput(AfterStep):
    """Logs tokens per second and peak memory.

    Args:
        tokens_per_step: tokens of one optimizer step over all devices.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._mark: tuple[int, float] | None = None

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Log at the logger's rate, over the steps since the last time."""
        now = time.perf_counter()
        if self._mark is None:
            self._mark = (step, now)
        elif step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            steps, seconds = step - self._mark[0], now - self._mark[1]
            pl_module.log("train/tokens_per_second", steps * self.tokens_per_step / seconds)
            if pl_module.device.type == "cuda":
                pl_module.log("train/peak_memory_gib", torch.cuda.max_memory_allocated() / 2**30)
            self._mark = (step, now)


class Validation(AfterStep):
    """Scores held-out text with thresholded decisions; logs loss, achieved ratio, and the ratio of every head.

    Args:
        open_batches: called once the text is there; returns token ids, each [B, T].
        folder: where heatmaps go as PNG.
        every_steps: optimizer steps between two.
    """

    def __init__(self, open_batches: Callable[[], list[Tensor]], folder: Path, every_steps: int) -> None:
        self.open_batches, self.folder, self.every_steps = open_batches, folder, every_steps
        self._batches: list[Tensor] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the held-out text."""
        self._batches = self.open_batches()

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Validate after a step whose turn it is."""
        if step % self.every_steps == 0 or step == trainer.max_steps:
            self.log_score(trainer, score_text(pl_module.model, self._batches, "validate"))

    def log_score(self, trainer: Trainer, score: TextScore) -> None:
        """Send a score to the loggers."""
        if not trainer.is_global_zero:
            return
        metrics = {"validation/loss": score.loss, "validation/achieved_ratio": score.achieved_ratio}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        if score.held is None:
            return
        image = self.folder / f"ratio_step_{trainer.global_step:07d}.png"
        draw_ratio_heatmap(1 / score.held, image, f"step {trainer.global_step}: CR {score.achieved_ratio:.2f}")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("validation/ratio_per_head", [str(image)], step=trainer.global_step)


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
