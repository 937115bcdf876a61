"""What a step logs: means over its micro-batches and all ranks, whatever way its batch is split."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from dmc.training.gradients import gradient_norm
from dmc.training.nonfinite import NonFiniteGuard

LOSS, RATIO_LOSS, NORM = "train/loss", "train/ratio_loss", "train/gradient_norm"
HELD = {"noisy_held": "train/noisy_ratio", "thresholded_held": "train/achieved_ratio"}
"""Shares of the cache, which can be averaged, and the ratios they are logged as."""
SHOWN = (LOSS, "train/target_ratio", "train/achieved_ratio")
"""What the progress bar shows."""


class StepMetrics(Callback):
    """Logs each step's figures, which the module has noted for each micro-batch, and has bad steps skipped.

    The figures are agreed between the ranks before each optimizer step, in one all-reduce of a few numbers.

    Args:
        guard: skips a step with a figure that is not finite.
    """

    def __init__(self, guard: NonFiniteGuard) -> None:
        self.guard = guard

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Reduce, log, and skip where needed; the gradients are complete and not yet clipped."""
        module: Any = pl_module
        if trainer.strategy.handles_gradient_accumulation and len(module.noted) < trainer.accumulate_grad_batches:
            return
        figures = self._reduce(trainer, module)
        if not all(map(math.isfinite, figures.values())):
            self.guard.skip(trainer, module, figures)
        metrics = {HELD.get(name, name): 1 / value if name in HELD else value for name, value in figures.items()}
        metrics |= {"train/skipped_steps": self.guard.skipped_steps}
        for name, value in (metrics | module.settings_at(trainer.global_step)).items():
            module.log(name, value, on_step=True, prog_bar=name in SHOWN)
        module.noted.clear()

    def _reduce(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Return the means over micro-batches and ranks, and the norm of the whole gradient.

        With a loss that is not finite on any rank, the mean is not finite on any.
        """
        noted: list[dict[str, Tensor]] = module.noted
        names = list(noted[0])
        means = [torch.stack([each[name].double() for each in noted]).mean() for name in names]
        own = torch.stack([*means, gradient_norm(module, trainer).double()])
        return dict(zip([*names, NORM], trainer.strategy.reduce(own, reduce_op="mean").tolist(), strict=True))
