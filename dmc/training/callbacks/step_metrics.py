"""What a step logs and leads: means over its micro-batches and all ranks, whatever way its batch is split."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import Tensor

from dmc.config import RatioControlConfig
from dmc.ranks import Ranks
from dmc.training.callbacks.nonfinite import NonFiniteGuard
from dmc.training.callbacks.steps import AfterStep
from dmc.training.gradients import clip_gradients

LOSS, RATIO_LOSS, NORM = "train/loss", "train/ratio_loss", "train/gradient_norm"
WEIGHT, SKIPPED = "train/ratio_weight", "train/skipped_steps"
HELD = {"noisy_held": "train/noisy_ratio", "thresholded_held": "train/achieved_ratio"}
"""Shares of the cache, which can be averaged, and the ratios they are logged as."""
SHOWN = (LOSS, "train/target_ratio", "train/achieved_ratio")
"""What the progress bar shows."""


class LateNumbers:
    """Numbers on their way from the device, to be read when the device has long gone on to other work."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """Wait until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()


class RatioControl(Callback):
    """Keeps the achieved ratio on its ramp: log(weight) integrates the relative excess of the cache.

    A cache larger than asked for raises the weight step by step, a smaller one (where the one-sided loss is 0) lowers
    it. Its state is one number, in the checkpoint; between checkpoints the host never reads it.

    Args:
        weight: at the start.
        settings: gain and bounds; None: the weight stays.
    """

    def __init__(self, weight: float, settings: RatioControlConfig | None) -> None:
        self.weight: float | Tensor = weight
        self.settings = settings

    def state_dict(self) -> dict[str, Any]:
        """Keep the weight in the checkpoint."""
        return {"weight": float(self.weight)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the weight."""
        self.weight = state_dict["weight"]

    def update(self, held: Tensor, target_ratio: float) -> None:
        """Learn what a step held; called by all ranks with the same figures.

        Args:
            held: share of the tokens that the relaxed decisions kept, over layers, heads and the whole batch, float64.
            target_ratio: CR asked for, >= 1.
        """
        if self.settings is None:
            return
        weight = self.weight * torch.exp(self.settings.gain * (held * target_ratio - 1))
        weight = weight.clamp(1 / self.settings.max_weight, self.settings.max_weight)
        self.weight = torch.where(held.isfinite(), weight, self.weight)


class _Step(NamedTuple):
    number: int
    names: list[str]
    numbers: LateNumbers
    settings: dict[str, float]


class StepMetrics(AfterStep):
    """Logs each step's figures, which the module has noted for each micro-batch, and has bad steps skipped.

    The figures are agreed between the ranks, in one all-reduce of a few numbers: before the optimizer's step, or after
    it where the strategy itself looks after the gradients. What depends on them happens on the device; the host reads
    those of a step once the next one is queued, so that the device never waits for the host.

    Args:
        guard: skips a step with a figure that is not finite.
        gradient_clip: largest gradient norm; None: gradients are never scaled.
        log_every_steps: optimizer steps between two that are logged.
    """

    def __init__(self, guard: NonFiniteGuard, gradient_clip: float | None, log_every_steps: int) -> None:
        self.guard, self.gradient_clip, self.log_every_steps = guard, gradient_clip, log_every_steps
        self.shown: dict[str, float] = {}
        """For the progress bar."""
        self._unread: _Step | None = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Mask or clip the gradients, which are complete."""
        module: Any = pl_module
        if not module.strategy.owns_gradients:
            norm = self._finish(trainer, module, trainer.global_step, optimizer)
            if self.gradient_clip is not None:
                clip_gradients(module, norm, self.gradient_clip)

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Take the figures where the strategy looks after the gradients."""
        module: Any = pl_module
        if module.strategy.owns_gradients:
            self._finish(trainer, module, step - 1, None)
            self._read(trainer)  # it has waited for the device already

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Log what the checkpoint holds: a run that goes on from it does not repeat these steps."""
        self._read(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the last step's figures."""
        self._read(trainer)

    def _finish(self, trainer: Trainer, module: Any, step: int, optimizer: Any) -> Tensor:
        """Have `step` skipped where a figure is not finite, read those of the step before; return the gradient's norm.

        With a loss that is not finite on any rank, the mean is not finite on any.
        """
        norm = module.strategy.gradient_norm(module)
        names = list(module.noted[0])
        means = [torch.stack([each[name].double() for each in module.noted]).mean() for name in names]
        figures = Ranks.all().averaged(torch.stack([*means, norm.to(module.device).double()]))
        is_skipped, num_skipped = self.guard.judge(step, figures, module.noted)
        if optimizer is not None:
            optimizer.found_inf = is_skipped.float()  # AdamW then changes neither weights nor its state
        added = [is_skipped, num_skipped]
        settings = module.settings_at(step)
        if RATIO_LOSS in names:
            control = module.ratio_control
            if isinstance(control.weight, Tensor):
                added.append(control.weight)
            else:
                settings[WEIGHT] = control.weight
            control.update(figures[names.index("noisy_held")], module.plan.at(step).target_ratio)
        numbers = torch.cat([figures, torch.stack([each.double() for each in added])])
        module.noted.clear()
        self._read(trainer)
        self._unread = _Step(step, [*names, NORM], LateNumbers(numbers), settings)
        return norm

    def _read(self, trainer: Trainer) -> None:
        """Log the step whose figures are under way, and tell the guard of it."""
        if self._unread is None:
            return
        step, names, late, settings = self._unread
        self._unread = None
        numbers = late.read()
        figures = dict(zip(names, numbers, strict=False))
        is_skipped, num_skipped, *weight = numbers[len(names) :]
        self.guard.note(trainer, step, bool(is_skipped), figures)
        metrics = {HELD.get(name, name): 1 / value if name in HELD else value for name, value in figures.items()}
        metrics |= {SKIPPED: num_skipped, **settings, **dict(zip([WEIGHT], weight, strict=False))}
        self.shown = {name: metrics[name] for name in SHOWN if name in metrics}
        if (step + 1) % self.log_every_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
                logger.save()  # a kill loses no line


class StepProgressBar(TQDMProgressBar):
    """Shows a few of the figures that the host has read."""

    def __init__(self, metrics: StepMetrics, refresh_rate: int) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._metrics = metrics

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Add them to Lightning's."""
        return {**super().get_metrics(trainer, pl_module), **self._metrics.shown}  # type: ignore[dict-item]
