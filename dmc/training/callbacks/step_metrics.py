"""Metrics of a step, means over its micro-batches and all ranks; steps that are not finite are skipped."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from dmc.ranks import Ranks
from dmc.training.callbacks.save_last import SaveLast
from dmc.training.callbacks.steps import AfterStep
from dmc.training.config import RatioControlConfig, TrainingConfig

LOSS, RATIO_LOSS, NORM = "train/loss", "train/ratio_loss", "train/gradient_norm"
WEIGHT, SKIPPED = "train/ratio_weight", "train/skipped_steps"
RATIO_METRICS = {
    "relaxed_cache_fraction": "train/noisy_ratio",
    "hard_cache_fraction": "train/achieved_ratio",
    "decided_fraction": "train/decided_ratio",
}
"""Shares of the cache, which can be averaged, and the ratios they are logged as."""
SHOWN = (LOSS, "train/target_ratio", "train/achieved_ratio", "train/decided_ratio")
"""Metrics in the progress bar."""
NONFINITE = "nonfinite"
"""Folder of the batches of skipped steps, in a run's output folder."""
logger = logging.getLogger(__name__)


class NonFiniteError(ArithmeticError):
    """Too many steps in a row had a loss or gradient that is not finite; the run's state is saved."""


class LateNumbers:
    """Numbers copied asynchronously from the device, to be read later without making the device wait."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()


class RatioControl(Callback):
    """Keeps the achieved ratio on its ramp: log(weight) integrates the relative excess of the cache.

    A cache above the target raises the weight step by step, one below it (where the one-sided loss is 0) lowers it. The
    state is one number, in the checkpoint; between checkpoints the host never reads it.

    Args:
        weight: initial weight.
        settings: gain and bounds; None: the weight is constant.
    """

    def __init__(self, weight: float, settings: RatioControlConfig | None) -> None:
        self.weight: float | Tensor = weight
        self.settings = settings

    def state_dict(self) -> dict[str, Any]:
        """Keep the weight in the checkpoint."""
        return {"weight": float(self.weight)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the weight."""
        self.weight = state_dict["weight"]

    def update(self, held: Tensor, target_ratio: float) -> None:
        """Update the weight after a step; called by all ranks with the same numbers.

        Args:
            held: share of tokens that the relaxed decisions kept, as the target counts them, over layers, heads and the
                whole batch, float64.
            target_ratio: target CR, >= 1.
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
    micro_batches: list[dict[str, Any]]
    losses: list[Tensor]


class StepMetrics(AfterStep):
    """Logs the metrics of each step, means over its micro-batches, and skips steps that are not finite.

    The metrics are averaged over ranks in one small all-reduce: before the optimizer's step, or after it where the
    strategy itself clips gradients. Everything that depends on them runs on the device; the host reads those of a step
    once the next one is queued, so that the device never waits for the host.

    A step with a non-finite metric counts in the plan and in the data order, but changes neither weights nor optimizer
    state; its batch is kept for replay. After too many in a row the device skips all later steps until the host has
    stopped the run.

    Args:
        training: settings of clipping, logging and the maximum of skipped steps in a row.
        folder: folder of the run.
        save_last: saves the run before it ends, with the weights that met the bad batches.
    """

    def __init__(self, training: TrainingConfig, folder: Path, save_last: SaveLast) -> None:
        self.training, self.folder, self.save_last = training, folder / NONFINITE, save_last
        self.shown: dict[str, float] = {}
        """Metrics for the progress bar."""
        self.skipped_steps: int | Tensor = 0
        """Number of skipped steps over all starts of the run."""
        self._bad_in_a_row: int | Tensor = 0  # the device's count
        self._noted_in_a_row = 0  # the host's
        self._last_bad = 0
        self._micro_batches: list[dict[str, Any]] = []
        self._unread: _Step | None = None

    def state_dict(self) -> dict[str, Any]:
        """Keep the count of skipped steps in the checkpoint."""
        return {"skipped_steps": int(self.skipped_steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the count."""
        self.skipped_steps = state_dict["skipped_steps"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the micro-batches of the current step."""
        self._micro_batches.append(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Mask or clip the complete gradients."""
        if not pl_module.strategy.clips_in_optimizer:
            norm = self._finish(trainer, pl_module, trainer.global_step, optimizer)
            if (most := self.training.gradient_clip) is not None:
                clip_grads_with_norm_(pl_module.parameters(), most, norm, foreach=False)  # any mesh

    def after_step(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Collect the metrics where the strategy clips gradients; stop a run that has skipped too many steps."""
        if pl_module.strategy.clips_in_optimizer:
            self._finish(trainer, pl_module, step - 1, None)
            self._read(trainer)  # it has waited for the device already
        if self._skips_too_many:
            self.save_last.save(trainer, step)
            trainer.should_stop = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Log the steps of the checkpoint, which a resumed run does not repeat."""
        self._read(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the last step's metrics.

        Raises:
            NonFiniteError: too many steps are skipped; on all ranks.
        """
        self._read(trainer)
        if self._skips_too_many:
            file = self.folder / file_name(self._last_bad, trainer.global_rank)
            raise NonFiniteError(
                f"the last {self._noted_in_a_row} steps up to step {self._last_bad + 1} had a loss or gradient that is "
                f"not finite (training.max_nonfinite_steps={self.training.max_nonfinite_steps}). The last checkpoint "
                f"has the weights that met them; `python scripts/replay.py run={self.folder.parent} file={file}` shows "
                f"where it starts. The same command goes on after step {trainer.global_step}"
            )

    @property
    def _skips_too_many(self) -> bool:
        return self._noted_in_a_row >= self.training.max_nonfinite_steps

    def _finish(self, trainer: Trainer, module: Any, step: int, optimizer: Any) -> Tensor:
        """Mark `step` as skipped if a metric is not finite, read the previous step's; return the gradient norm.

        With a loss that is not finite on any rank, the mean is not finite on any.
        """
        norm = module.strategy.gradient_norm(module)
        names = list(module.micro_batch_metrics[0])
        means = [torch.stack([each[name].double() for each in module.micro_batch_metrics]).mean() for name in names]
        figures = Ranks.world().all_reduce(torch.stack([*means, norm.to(module.device).double()]), "avg")
        is_skipped = ~figures.isfinite().all() | (self._bad_in_a_row >= self.training.max_nonfinite_steps)
        self._bad_in_a_row = (self._bad_in_a_row + 1) * is_skipped
        self.skipped_steps = self.skipped_steps + is_skipped
        if optimizer is not None:
            optimizer.found_inf = is_skipped.float()  # AdamW then changes neither weights nor its state
        added = [is_skipped, self.skipped_steps]
        settings = module.settings_at(step)
        if RATIO_LOSS in names:
            control = module.ratio_control
            if isinstance(control.weight, Tensor):
                added.append(control.weight)
            else:
                settings[WEIGHT] = control.weight
            control.update(figures[names.index("relaxed_cache_fraction")], module.plan.at(step).target_ratio)
        late = LateNumbers(torch.cat([figures, torch.stack([each.double() for each in added])]))
        finished = _Step(
            step,
            [*names, NORM],
            late,
            settings,
            self._micro_batches,
            [each[LOSS] for each in module.micro_batch_metrics],
        )
        self._micro_batches = []
        module.micro_batch_metrics.clear()
        self._read(trainer)
        self._unread = finished
        return norm

    def _read(self, trainer: Trainer) -> None:
        """Log the pending step, and keep its batch if it was skipped."""
        step, self._unread = self._unread, None
        if step is None:
            return
        numbers = step.numbers.read()
        figures = dict(zip(step.names, numbers, strict=False))
        is_skipped, num_skipped, *weight = numbers[len(step.names) :]
        self._note(trainer, step, bool(is_skipped), figures)
        metrics = {
            RATIO_METRICS.get(name, name): 1 / value if name in RATIO_METRICS else value
            for name, value in figures.items()
        }
        metrics |= {SKIPPED: num_skipped, **step.settings, **dict(zip([WEIGHT], weight, strict=False))}
        self.shown = {name: metrics[name] for name in SHOWN if name in metrics}
        if (step.number + 1) % self.training.log_every_steps == 0:
            for each in trainer.loggers:
                each.log_metrics(metrics, step=step.number)
                each.save()  # a kill loses no line

    def _note(self, trainer: Trainer, step: _Step, is_skipped: bool, figures: dict[str, float]) -> None:
        """Count skipped steps in a row, and keep this one's batch."""
        if self._skips_too_many:
            return  # already counted as skipped
        self._noted_in_a_row = self._noted_in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        self._last_bad = step.number
        shown = ", ".join(f"{name.removeprefix('train/')} {value:g}" for name, value in figures.items())
        path = self.folder / file_name(step.number, trainer.global_rank)
        kept = [_kept(batch, loss) for batch, loss in zip(step.micro_batches, step.losses, strict=True)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step.number, "rank": trainer.global_rank, "micro_batches": kept}, path)
            outcome = f"its batch is kept in {path}"
        except (OSError, RuntimeError) as error:  # if one rank ended here, the others would wait forever
            with contextlib.suppress(OSError):
                path.unlink()
            outcome = f"its batch could not be kept: {error}"
        logger.warning("step %d is skipped (%s); %s", step.number, shown, outcome)


def _kept(batch: dict[str, Any], loss: Tensor) -> dict[str, Any]:
    """Return the data of a micro-batch for a replay, on the CPU, with its loss."""
    tensors = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)}
    if batch.get("documents") is not None:
        tensors["document_starts"] = batch["documents"].starts.cpu()
    return tensors | {"position": torch.tensor(batch["position"]), "loss": float(loss)}


def file_name(step: int, rank: int) -> str:
    """Return the file name of a skipped step's micro-batches on one rank."""
    return f"step_{step:07d}_rank{rank}.pt"


class StepProgressBar(TQDMProgressBar):
    """Shows some of the metrics that the host has read."""

    def __init__(self, metrics: StepMetrics, refresh_rate: int) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._metrics = metrics

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Add them to Lightning's metrics."""
        return {**super().get_metrics(trainer, pl_module), **self._metrics.shown}  # type: ignore[dict-item]
