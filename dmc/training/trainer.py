"""The Lightning trainer of a run: strategy, precision, and what watches it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning import Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from dmc.target import build_targets
from dmc.training.callbacks.measured_start import MeasuredStart
from dmc.training.callbacks.preemption import Preemption
from dmc.training.callbacks.regressed_start import RegressedStart
from dmc.training.callbacks.step_metrics import StepMetrics, StepProgressBar
from dmc.training.callbacks.steps import StepProgress
from dmc.training.callbacks.throughput import Throughput
from dmc.training.callbacks.validation import Validation
from dmc.training.callbacks.watchdog import HangWatchdog
from dmc.training.exporter import Exporter
from dmc.training.module import RetrofitModule


def build_trainer(
    module: RetrofitModule,
    exporter: Exporter,
    preemption: Preemption,
    loggers: list[Logger],
) -> Trainer:
    """Make the trainer of a run.

    Args:
        module: with the run's configuration, plan and strategy.
        exporter: has the held-out text, and writes the snapshots.
        preemption: stops the run on a signal, and saves it.
        loggers: receive the figures.
    Raises:
        ValueError: the batch cannot be divided among the devices, or this machine has no such devices.
    """
    config, strategy = module.config, cast(Any, module.strategy)
    training, settings = config.training, config.trainer
    throughput = Throughput(config)
    own = build_targets(config.callbacks, "callbacks", Callback)
    watching = [*_watching_callbacks(module, exporter, preemption), *own]
    plugins: list[Any] = []
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        # Lightning's own requeue saves from inside the signal handler: two ranks then wait for each other for ever.
        plugins.append(SLURMEnvironment(auto_requeue=False))
    try:
        trainer = Trainer(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=strategy,
            precision=strategy.precision,
            max_steps=module.plan.total_steps,
            max_epochs=1,
            gradient_clip_val=training.gradient_clip if strategy.clips_in_optimizer else None,  # else see `StepMetrics`
            logger=loggers,
            callbacks=[throughput, StepProgress(), module.ratio_control, *watching, preemption.save_last, preemption],
            profiler=throughput.data_clock,
            plugins=plugins,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            log_every_n_steps=training.log_every_steps,
            default_root_dir=config.output_dir,
            **settings.lightning,
        )
    except MisconfigurationException as error:
        further = "".join(f", {name}={value}" for name, value in settings.lightning.items())
        given = f"accelerator={settings.accelerator}, devices={settings.devices}{further}"
        raise ValueError(f"trainer.{given}: {error}") from error
    trainer.accumulate_grad_batches = training.accumulation(trainer.world_size // settings.tensor_parallel_size)
    return trainer


def _watching_callbacks(module: RetrofitModule, exporter: Exporter, preemption: Preemption) -> list[Callback]:
    """Make what acts after a step, in its order; saving comes after all of it."""
    training, folder = module.config.training, Path(module.config.output_dir)
    held_out = exporter.data.held_out
    start = training.measured_start if module.has_gates else None
    fitted = training.regressed_start if module.has_gates else None
    shows_progress = module.config.trainer.lightning.get("enable_progress_bar", True)
    metrics = StepMetrics(training, folder, preemption.save_last)
    return [
        *([] if start is None else [MeasuredStart(partial(held_out, "calibration"), start, folder)]),
        *([] if fitted is None else [RegressedStart(partial(held_out, "calibration"), fitted, folder)]),
        HangWatchdog(folder / "stacks", training.hang_timeout_minutes * 60),
        *([StepProgressBar(metrics, refresh_rate=training.log_every_steps)] if shows_progress else []),
        metrics,
        Validation(partial(held_out, "validation"), folder / "heatmaps", training.validate_every_steps),
        exporter,
    ]
