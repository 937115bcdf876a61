"""Validation on held-out text during a run, and heatmaps of layers and KV heads: ratios and compression costs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from torch import Tensor

from dmc.files import append_line
from dmc.ranks import Ranks
from dmc.training.after_step import AfterStep
from dmc.training.measure import TextScore, score_text

RATIOS_NAME = "ratios.jsonl"
"""One line per validation: the step, and the share of its tokens each head holds, layer by layer."""
MOST_NUMBERS = 128
"""Cells up to which each has its value written into it."""


_logger = logging.getLogger(__name__)


class Validation(AfterStep):
    """Scores held-out text as it is trained on, but with thresholded decisions.

    Logs loss and achieved ratio; ratios of heads and layers go into a file and pictures (the paper's figures 6 and 7).

    Args:
        open_batches: returns held-out text, see `score_text`; called once the text is prepared.
        folder: where heatmaps go as PNG, and the ratios they show.
        every_steps: optimizer steps between two.
    """

    def __init__(self, open_batches: Callable[[], list[dict[str, Any]]], folder: Path, every_steps: int) -> None:
        self.open_batches, self.folder, self.every_steps = open_batches, folder, every_steps
        self._batches: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the held-out text."""
        self._batches = self.open_batches()

    def after_step(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Validate after every `every_steps`-th step."""
        if step % self.every_steps == 0 or step == trainer.max_steps:
            with trainer.precision_plugin.forward_context():
                score = score_text(pl_module.model, self._batches, "validate", Ranks.world())
            self.log_score(trainer, score)

    def log_score(self, trainer: Trainer, score: TextScore) -> None:
        """Send a score to the loggers."""
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        ratios = {"achieved_ratio": score.achieved_ratio, "decided_ratio": score.decided_ratio}
        metrics = {"validation/loss": score.loss, **{f"validation/{name}": ratio for name, ratio in ratios.items()}}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        if score.held is None:
            return
        heads, layers = self.folder / f"ratio_step_{step:07d}.png", self.folder / "evolution.png"
        title = f"step {step}: CR {score.achieved_ratio:.2f}"
        draw_heatmap(1 / score.held, heads, title, "KV head", range(score.held.shape[1]))
        append_ratios(self.folder / RATIOS_NAME, step, score.held)
        steps, held = read_ratios(self.folder / RATIOS_NAME)
        draw_heatmap(1 / held.mean(-1).T, layers, "CR of each layer", "training step", steps)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("validation/ratio_per_head", [str(heads)], step=step)
                logger.log_image("validation/ratio_per_layer", [str(layers)], step=step)


def append_ratios(path: Path, step: int, held: Tensor) -> None:
    """Append the shares held after a step, [L, H], to a file that persists over restarts."""
    append_line(path, json.dumps({"step": step, "held": held.tolist()}))


def read_ratios(path: Path) -> tuple[list[int], Tensor]:
    """Return the steps in order and the shares held after each, [S, L, H]; for repeated steps the later values.

    Lines that a crash or a full disk has torn are left out, with a warning.
    """
    held = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            held[row["step"]] = torch.tensor(row["held"])
        except (ValueError, LookupError, TypeError):
            _logger.warning("%s, line %d is damaged: it is left out", path, number)
    steps = sorted(held)
    return steps, torch.stack([held[step] for step in steps])


def draw_heatmap(
    values: Tensor,
    path: Path,
    title: str,
    xlabel: str,
    columns: Sequence[int],
    label: str = "compression ratio",
    lowest: float = 1.0,
) -> None:
    """Draw values of each layer, [L, columns], as a PNG.

    Args:
        values: at least `lowest`.
        path: the picture.
        title: title of the plot.
        xlabel: meaning of the columns.
        columns: numbers of the columns.
        label: meaning of the values.
        lowest: lower end of the color scale.
    """
    num_layers, num_columns = values.shape
    size = min(24.0, max(3.0, 0.45 * num_columns + 1.8)), max(2.6, 0.32 * num_layers + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis", vmin=lowest)
    axes.set(title=title, xlabel=xlabel, ylabel="layer")
    axes.set_yticks(range(0, num_layers, max(1, num_layers // 16)))
    places = range(0, num_columns, max(1, num_columns // 8))
    axes.set_xticks(places, [str(columns[place]) for place in places])
    if values.numel() <= MOST_NUMBERS:
        middle = float(values.max() + lowest) / 2
        for (layer, column), value in np.ndenumerate(values.numpy()):
            color = "w" if value < middle else "k"
            axes.text(column, layer, f"{value:.1f}", ha="center", va="center", color=color)
    figure.colorbar(image, label=label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
