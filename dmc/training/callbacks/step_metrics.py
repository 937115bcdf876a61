"""What a step logs: means over its micro-batches and all ranks, whatever way its batch is split."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor

from dmc.training.callbacks.after_step import AfterStep
from dmc.training.callbacks.nonfinite import NonFiniteGuard
from dmc.training.gradients import clip_gradients

LOSS, RATIO_LOSS, NORM = "train/loss", "train/ratio_loss", "train/gradient_norm"
HELD = {"noisy_held": "train/noisy_ratio", "thresholded_held": "train/achieved_ratio"}
"""Shares of the cache, which can be averaged, and the ratios they are logged as."""
SHOWN = (LOSS, "train/target_ratio", "train/achieved_ratio")
"""What the progress bar shows."""


class StepMetrics(AfterStep):
    """Logs each step's figures, which the module has noted for each micro-batch, and has bad steps skipped.

    The figures are agreed between the ranks, in one all-reduce of a few numbers: before the optimizer's step, or after
    it where the strategy itself looks after the gradients.

    Args:
        guard: skips a step with a figure that is not finite.
        gradient_clip: largest gradient norm; None: gradients are never scaled.
    """

    def __init__(self, guard: NonFiniteGuard, gradient_clip: float | None) -> None:
        self.guard, self.gradient_clip = guard, gradient_clip

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Log, and skip or clip; the gradients are complete."""
        module: Any = pl_module
        if not module.strategy.owns_gradients:
            norm = self._finish(trainer, module, trainer.global_step)
            if self.gradient_clip is not None:
                clip_gradients(module, norm, self.gradient_clip)

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Log, and count a step that was skipped."""
        module: Any = pl_module
        if module.strategy.owns_gradients:
            self._finish(trainer, module, step - 1)

    def _finish(self, trainer: Trainer, module: Any, step: int) -> Tensor:
        """Log the figures of `step` and have it skipped where one is not finite; return the gradient's norm."""
        norm = module.strategy.gradient_norm(module)
        figures = self._reduce(trainer, module, norm)
        if not all(map(math.isfinite, figures.values())):
            self.guard.skip(trainer, module, step, figures)
        metrics = {HELD.get(name, name): 1 / value if name in HELD else value for name, value in figures.items()}
        metrics |= {"train/skipped_steps": self.guard.skipped_steps}
        for name, value in (metrics | module.settings_at(step)).items():
            module.log(name, value, on_step=True, prog_bar=name in SHOWN)
        if "noisy_held" in figures:
            module.ratio_control.update(figures["noisy_held"], module.plan.at(step).target_ratio)
        module.noted.clear()
        return norm

    def _reduce(self, trainer: Trainer, module: Any, norm: Tensor) -> dict[str, float]:
        """Return the means over micro-batches and ranks, and the norm of the whole gradient.

        With a loss that is not finite on any rank, the mean is not finite on any.
        """
        noted: list[dict[str, Tensor]] = module.noted
        names = list(noted[0])
        means = [torch.stack([each[name].double() for each in noted]).mean() for name in names]
        own = torch.stack([*means, norm.to(module.device).double()])
        return dict(zip([*names, NORM], trainer.strategy.reduce(own, reduce_op="mean").tolist(), strict=True))
