"""The training step, from top to bottom as it runs: `OptimizerStep.run` is one step, in seven numbered moves.

The methods behind the moves follow in their order, then the control of the compression ratio (`RatioControl`). A step's
micro-batches come from `micro_batches.py`. The loss is in `module.py`, which knows nothing of the step.

A step whose loss or gradient is not finite on any rank counts in the plan and in the data order, but changes neither
weights nor optimizer state. All that depends on the figures of a step runs on the device, which never waits for the
host: the host reads them once the next step is queued.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from dmc.ranks import Ranks
from dmc.training.config import RatioControlConfig, TrainingConfig
from dmc.training.micro_batches import share_predicted_tokens
from dmc.training.module import Schedule
from dmc.training.stages import Plan
from dmc.training.strategies.parallelism import keep_rows

LOSS, RATIO_LOSS, NORM = "train/loss", "train/ratio_loss", "train/gradient_norm"
WEIGHT, SKIPPED = "train/ratio_weight", "train/skipped_steps"
OPTIMIZATION = "optimization"
"""Key of the state of `OptimizerStep` in a checkpoint."""
MAX_TARGET_FACTOR = 2.0
"""Largest factor on the target of relaxed decisions, and the inverse of the smallest."""
RATIO_METRICS = {
    "relaxed_cache_fraction": "train/noisy_ratio",
    "hard_cache_fraction": "train/achieved_ratio",
    "decided_fraction": "train/decided_ratio",
}
"""Shares of the cache, which can be averaged, and the ratios they are logged as."""
HARD_FRACTIONS = {"held": "hard_cache_fraction", "decided": "decided_fraction"}
"""Share of the cache under thresholded decisions that the target ratio is of, by `compression.target_counts`."""
logger = logging.getLogger(__name__)


class NonFiniteError(ArithmeticError):
    """Too many steps in a row had a loss or gradient that is not finite; the run's state is saved."""


class OptimizerStep(Callback):
    """Takes the optimizer steps of a run, and keeps what outlives one: skipped steps, and the ratio loss's weight.

    Lightning gives each step's micro-batches to the strategy, which calls `run`. As the last callback it acts after all
    others.

    Args:
        plan: the run's stages.
        training: settings of clipping, logging, and how many steps in a row may be skipped.
    """

    def __init__(self, plan: Plan, training: TrainingConfig) -> None:
        self.plan, self.training = plan, training
        self.ratio_control = RatioControl(training.ratio_weight, training.ratio_control)
        self.latest: dict[str, float] = {}
        """Metrics of the last step that the host has read."""
        self.is_last_micro_batch = False
        self.ended = 0.0
        """When the last step ended, after all callbacks, by `time.perf_counter`."""
        self._skipped_steps: int | Tensor = 0
        self._skips_in_a_row_on_device: int | Tensor = 0  # as the device counts
        self._skips_in_a_row, self._last_skipped = 0, 0  # as the host does
        self._pending: Figures | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the strategy take its steps here."""
        strategy: Any = trainer.strategy
        strategy.take_step = lambda micro_batches: self.run(pl_module, micro_batches)

    def run(self, module: Any, micro_batches: list[dict[str, Any]]) -> None:
        """Take one optimizer step, on all ranks together.

        Args:
            module: the `RetrofitModule`, with Lightning's trainer.
            micro_batches: those of this rank, from `StepLoader`.
        """
        step, optimizer, strategy, trainer = module.global_step, module.optimizers(), module.strategy, module.trainer

        # 1. Schedules. Learning rate, target ratio and delay are functions of the step.
        self.prepare(module, step)
        schedule = self.schedule_at(step)
        for group in optimizer.param_groups:
            group["lr"] = schedule.state.learning_rate

        # 2. Loss and backward pass of each micro-batch. The gradient is scaled here: each loss is a sum over its tokens
        # (or sequences) by their mean number in all of the step's micro-batches on all ranks, and is divided by the
        # number of micro-batches; the strategy averages over ranks. bfloat16 has float32's range: no scale for it.
        share_predicted_tokens(micro_batches)
        metrics: list[dict[str, Tensor]] = []
        for micro_batch in micro_batches:
            self.is_last_micro_batch = micro_batch is micro_batches[-1]
            with nullcontext() if self.is_last_micro_batch else strategy.block_backward_sync():
                with trainer.precision_plugin.forward_context():
                    loss, measured = trainer.model(schedule, micro_batch)
                module.manual_backward(loss / len(micro_batches))
            metrics.append(measured)
        self.mask_gradients(module)

        # DeepSpeed checks, clips and skips inside its own step: there move 5 comes before move 3, which has no 4.
        if strategy.clips_in_optimizer:
            optimizer.step()

        # 3. Average the figures over all ranks, decide whether all are finite, and control the ratio.
        positions = [micro_batch["position"] for micro_batch in micro_batches]
        figures = self.average_and_decide(module, step, metrics, positions)

        if not strategy.clips_in_optimizer:
            # 4. Clip the gradients, or skip the step.
            self.clip_or_skip(module, optimizer.optimizer, figures)
            # 5. Optimizer.
            optimizer.step()
        optimizer.zero_grad()

        # 6. Log the step before, which the host reads now that this one is queued.
        self.read(trainer)
        self._pending = figures
        if strategy.clips_in_optimizer:
            self.read(trainer)  # DeepSpeed has waited for the device already

        # 7. Stop if too many in a row were skipped: until the host knows, the device skips all that follow.
        if self._skips_in_a_row >= self.training.max_nonfinite_steps:
            trainer.should_stop = True  # upon which `SaveLast` saves

    def prepare(self, module: Any, step: int) -> None:
        """Zero the borrowed neuron's rows after the zero-out stage, and set the delay of the plan."""
        if not module.has_gates:
            return
        if self.plan.neuron_removed_at(step):
            for parameter, rows in module.model.neuron_rows():
                module.strategy.set_rows(parameter, rows, 0.0)
        delay = self.plan.at(step).delay
        if delay is not None and delay != module.model.compression.delay:
            module.model.compression = dataclasses.replace(module.model.compression, delay=delay)

    def schedule_at(self, step: int) -> Schedule:
        """Return what the loss of a step depends on beside its text: the plan, and the control of the ratio."""
        state, control = self.plan.at(step), self.ratio_control
        return Schedule(step, state, control.weight, control.target(state.target_ratio))

    def mask_gradients(self, module: Any) -> None:
        """Mask the gradients of all rows but the borrowed neuron's if only gates are trained."""
        if self.training.gates_only and module.has_gates:
            for parameter, rows in module.model.neuron_rows():
                keep_rows(parameter, rows)

    def average_and_decide(
        self, module: Any, step: int, metrics: list[dict[str, Tensor]], positions: Sequence[list[int]] = ()
    ) -> Figures:
        """Average the figures of a step over micro-batches and ranks, decide whether to skip it, and control the ratio.

        A figure that is not finite on one rank makes the mean so on all of them: all skip, or none.

        Args:
            module: the `RetrofitModule`, with the gradients of the step.
            step: number of optimizer steps before it.
            metrics: of each micro-batch, scalars on the device.
            positions: samples of each micro-batch.
        """
        norm = module.strategy.gradient_norm(module)
        names = list(metrics[0])
        means = [torch.stack([of_one[name].double() for of_one in metrics]).mean() for name in names]
        figures = Ranks.world().all_reduce(torch.stack([*means, norm.to(module.device).double()]), "avg")
        is_skipped = ~figures.isfinite().all() | (self._skips_in_a_row_on_device >= self.training.max_nonfinite_steps)
        self._skips_in_a_row_on_device = (self._skips_in_a_row_on_device + 1) * is_skipped
        self._skipped_steps = self._skipped_steps + is_skipped

        settings = self._settings_at(step, module.has_gates)
        losses = [of_one[LOSS].double() for of_one in metrics]
        more = {SKIPPED: self._skipped_steps}
        if RATIO_LOSS in names:
            if isinstance(self.ratio_control.weight, Tensor):
                more[WEIGHT] = self.ratio_control.weight
            else:
                settings[WEIGHT] = self.ratio_control.weight
            self._control_ratio(module, step, dict(zip(names, figures, strict=False)))
        added = [number.double() for number in (*more.values(), is_skipped)]
        numbers = LateNumbers(torch.cat([figures, torch.stack([*added, *losses])]))
        return Figures(step, norm, is_skipped, [*names, NORM, *more], numbers, settings, positions)

    def _control_ratio(self, module: Any, step: int, figures: dict[str, Tensor]) -> None:
        """Move the weight of the ratio loss, and in the last stage the target, by what the step has held."""
        state, thresholded = self.plan.at(step), None
        if state.stage == "solidify":
            thresholded = figures[HARD_FRACTIONS[module.model.compression.target_counts]]
        self.ratio_control.update(figures["relaxed_cache_fraction"], state.target_ratio, thresholded=thresholded)

    def clip_or_skip(self, module: Any, optimizer: Any, figures: Figures) -> None:
        """Clip the gradients; let the fused AdamW change neither weights nor its state if the step is skipped."""
        if (most := self.training.gradient_clip) is not None:
            clip_grads_with_norm_(module.parameters(), most, figures.norm, foreach=False)  # gradients of any mesh
        optimizer.found_inf = figures.is_skipped.float()

    def _settings_at(self, step: int, has_gates: bool) -> dict[str, float]:
        """Return the schedules' values at a step, by the names they are logged under."""
        state = self.plan.at(step)
        settings = {"train/learning_rate": state.learning_rate}
        if not has_gates:
            return settings
        if state.neuron_multiplier is None:
            return settings | {"train/target_ratio": state.target_ratio}
        return settings | {"train/neuron_multiplier": state.neuron_multiplier}

    def read(self, trainer: Any) -> None:
        """Log the figures of the last step, for which the host waits."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        numbers = pending.numbers.read()
        figures = dict(zip(pending.names, numbers, strict=False))
        is_skipped, *losses = numbers[len(pending.names) :]
        self._count(pending, bool(is_skipped), figures, losses, trainer.global_rank)
        metrics = {
            RATIO_METRICS.get(name, name): 1 / value if name in RATIO_METRICS else value
            for name, value in figures.items()
        }
        self.latest = metrics | pending.settings
        if (pending.step + 1) % self.training.log_every_steps == 0:
            for run_logger in trainer.loggers:
                run_logger.log_metrics(self.latest, step=pending.step)
                run_logger.save()  # a kill loses no line

    def _count(
        self, pending: Figures, is_skipped: bool, figures: dict[str, float], losses: list[float], rank: int
    ) -> None:
        if self._skips_in_a_row >= self.training.max_nonfinite_steps:
            return  # the steps until the run has stopped
        self._skips_in_a_row = self._skips_in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        self._last_skipped = pending.step
        means = ", ".join(f"{name.removeprefix('train/')} {figures[name]:g}" for name in (LOSS, NORM))
        batches = "; ".join(f"{p} with loss {loss:g}" for p, loss in zip(pending.positions, losses, strict=False))
        logger.warning("step %d is skipped (%s); rank %d had the samples %s", pending.step, means, rank, batches)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the end of a step."""
        self.ended = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last step.

        Raises:
            NonFiniteError: too many steps in a row were skipped; on all ranks.
        """
        self.read(trainer)
        if self._skips_in_a_row >= self.training.max_nonfinite_steps:
            raise NonFiniteError(
                f"the last {self._skips_in_a_row} steps up to step {self._last_skipped + 1} had a loss or gradient "
                f"that is not finite (training.max_nonfinite_steps={self.training.max_nonfinite_steps}). The last "
                "checkpoint holds the weights with which it happened; the same command goes on after step "
                f"{trainer.global_step}"
            )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what outlives a step to a checkpoint."""
        self.read(trainer)  # a resumed run does not log these steps again
        checkpoint[OPTIMIZATION] = {
            "skipped_steps": int(self._skipped_steps),
            "ratio_weight": float(self.ratio_control.weight),
            "target_factor": float(self.ratio_control.target_factor),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore it.

        Raises:
            ValueError: it is not there.
        """
        try:
            state = checkpoint[OPTIMIZATION]
            self._skipped_steps, self.ratio_control.weight = state["skipped_steps"], state["ratio_weight"]
        except KeyError as error:
            raise ValueError(
                f"the checkpoint lacks {error}: another version of dmc has written it; go on with that one, or choose "
                "another output_dir"
            ) from error
        self.ratio_control.target_factor = state.get("target_factor", 1.0)


class Figures(NamedTuple):
    """Figures of a step."""

    step: int
    norm: Tensor
    """Norm of the gradient before clipping, on the device."""
    is_skipped: Tensor
    names: list[str]
    """Of the figures that are logged."""
    numbers: LateNumbers
    """Those figures, whether the step is skipped, and the losses of this rank's micro-batches."""
    settings: dict[str, float]
    """The schedules' values."""
    positions: Sequence[list[int]]
    """Samples of each micro-batch, in the global order of draws."""


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


class RatioControl:
    """Keeps the achieved ratio on its ramp: log(weight) integrates the relative excess of the cache.

    A cache above the target raises the weight step by step, one below it (where the one-sided loss is 0) lowers it. In
    the last stage a factor on the target integrates what thresholded decisions, which are those of inference, miss it
    by: the relaxed ones then settle beside it. Between checkpoints the host never reads the state.

    Args:
        weight: initial weight.
        settings: gain and bounds; None: the weight is constant.
    """

    def __init__(self, weight: float, settings: RatioControlConfig | None) -> None:
        self.weight: float | Tensor = weight
        self.target_factor: float | Tensor = 1.0
        self.settings = settings

    def target(self, target_ratio: float) -> float | Tensor:
        """Return the ratio that relaxed decisions are to meet so that thresholded ones meet a target."""
        target = target_ratio * self.target_factor
        return target.clamp(min=1) if isinstance(target, Tensor) else max(1.0, target)

    def update(self, held: Tensor, target_ratio: float, thresholded: Tensor | None = None) -> None:
        """Update the weight after a step; called by all ranks with the same numbers.

        Args:
            held: share of tokens that the relaxed decisions kept, as the target counts them, over layers, heads and the
                whole batch, float64.
            target_ratio: target CR, >= 1.
            thresholded: the same share under thresholded decisions, in the last stage; None: the factor stays.
        """
        if self.settings is None:
            return
        weight = self.weight * torch.exp(self.settings.gain * (held * self.target(target_ratio) - 1))
        weight = weight.clamp(1 / self.settings.max_weight, self.settings.max_weight)
        self.weight = torch.where(held.isfinite(), weight, self.weight)
        if thresholded is not None:
            factor = self.target_factor * torch.exp(self.settings.gain * (thresholded * target_ratio - 1))
            factor = factor.clamp(1 / MAX_TARGET_FACTOR, MAX_TARGET_FACTOR)
            self.target_factor = torch.where(thresholded.isfinite(), factor, self.target_factor)
