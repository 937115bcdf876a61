"""Held-out text along a run, with heatmaps of the ratios."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from dmc.measure import TextScore, score_text
from dmc.ranks import Ranks
from dmc.training.callbacks.heatmap import RATIOS_NAME, RatioHistory, draw_ratio_evolution, draw_ratio_heatmap
from dmc.training.callbacks.steps import AfterStep


class Validation(AfterStep):
    """Scores held-out text as it is trained on, but with thresholded decisions.

    Logs loss, achieved ratio, and the ratio of every head.

    Args:
        open_batches: called once the text is there; returns held-out text, see `score_text`.
        folder: where heatmaps go as PNG, and the ratios they show.
        every_steps: optimizer steps between two.
    """

    def __init__(self, open_batches: Callable[[], list[dict[str, Any]]], folder: Path, every_steps: int) -> None:
        self.open_batches, self.folder, self.every_steps = open_batches, folder, every_steps
        self._batches: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the held-out text."""
        self._batches = self.open_batches()

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Validate after a step whose turn it is."""
        if step % self.every_steps == 0 or step == trainer.max_steps:
            module: Any = pl_module
            with trainer.precision_plugin.forward_context():
                score = score_text(module.model, self._batches, "validate", Ranks.all())
            self.log_score(trainer, score)

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
        history = RatioHistory(self.folder / RATIOS_NAME)
        history.append(trainer.global_step, score.held)
        evolution = self.folder / "evolution.png"
        draw_ratio_evolution(*history.read(), evolution)
        images = {"validation/ratio_per_head": image, "validation/ratio_per_layer": evolution}
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                for name, path in images.items():
                    logger.log_image(name, [str(path)], step=trainer.global_step)
