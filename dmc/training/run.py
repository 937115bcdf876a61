"""One training run from configuration to exported folder; finished parts are reused, a killed run goes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from transformers import AutoConfig, AutoModelForCausalLM

from dmc.config import ModelConfig, RunConfig
from dmc.export import METRICS_NAME
from dmc.models import load_model, retrofit
from dmc.provenance import provenance
from dmc.training.callbacks import Snapshots, Throughput, Validation
from dmc.training.checkpoint import LAST_CHECKPOINT, AtomicCheckpointIO, SaveLast, read_checkpoint
from dmc.training.exporter import CONFIG_NAME, Exporter
from dmc.training.module import RetrofitModule
from dmc.training.stages import Plan
from dmc.training.text_data import TextData, build_tokenizer

logger = logging.getLogger(__name__)
PLACES = {"output_dir", "logger", "data.cache_folder", "data.num_workers", "training.log_every_steps"}
"""Settings that may change between the parts of one run."""


@dataclass(frozen=True)
class TrainedRun:
    """What a finished run left on disk."""

    folder: Path
    """The run's output folder."""
    final: Path
    """Exported model after the last step."""
    snapshots: dict[float, Path]
    """Exported models along the ramp, by target ratio."""

    def metrics(self, folder: Path) -> dict[str, Any]:
        """Figures measured when `folder` was exported."""
        return json.loads((folder / METRICS_NAME).read_text())["metrics"]


def build_model(config: ModelConfig, vocab_size: int, seed: int) -> Any:
    """Load the model to start from, or make a fresh one with `vocab_size` tokens."""
    if config.path is not None:
        return load_model(config.path, dtype=getattr(torch, config.dtype), revision=config.revision)
    seed_everything(seed, verbose=False)
    values = dict(config.fresh or {})
    if "model_type" not in values:
        raise ValueError("model.fresh has no model_type: name a family such as llama")
    values.setdefault("vocab_size", vocab_size)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=getattr(torch, config.dtype))


def _keep_quiet() -> None:
    """Leave the terminal to the progress bar: no device tables, tips or shard counters."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    transformers.utils.logging.disable_progress_bar()


def train(config: RunConfig) -> TrainedRun:
    """Train, validate, snapshot, calibrate and export one run.

    A finished run is returned as it is; an unfinished one goes on at the step after its last checkpoint, with the same
    data order and noise.

    Raises:
        ValueError: the output folder holds a run with other settings, or a damaged or foreign checkpoint.
    """
    folder = Path(config.output_dir)
    module, data, tokenizer = None, None, None
    _claim(folder, config)
    plan = Plan(config.training, config.target_ratio)
    ratios = plan.snapshot_steps(config.training.snapshot_ratios).values() if config.has_gates else ()
    run = TrainedRun(folder, folder / "final", {ratio: folder / "snapshots" / f"cr{ratio:g}" for ratio in ratios})
    if (run.final / METRICS_NAME).is_file():
        logger.info("%s is finished; reused", folder)
        return run
    _keep_quiet()
    seed_everything(config.seed, verbose=False)
    tokenizer = build_tokenizer(config.data, config.model.path)
    model = build_model(config.model, len(tokenizer), config.seed)
    if config.compression is not None and config.has_gates:
        model = retrofit(model, config.compression)
    module = RetrofitModule(model, config, plan, tokenizer.eos_token_id)
    data = TextData(config, tokenizer, plan.total_steps)
    data.prepare_data()
    exporter = Exporter(config, data, tokenizer)
    trainer = _build_trainer(config, module, data, exporter, run)
    checkpoint = folder / "checkpoints" / LAST_CHECKPOINT
    if checkpoint.exists():
        read_checkpoint(checkpoint)
    trainer.fit(module, data, ckpt_path=str(checkpoint) if checkpoint.exists() else None, weights_only=True)
    if trainer.is_global_zero:
        exporter.write(module.model, run.final, config.target_ratio)
    return run


def _claim(folder: Path, config: RunConfig) -> None:
    """Record the configuration in the output folder, or check that it is the same run that goes on there."""
    record, values = folder / CONFIG_NAME, _flat(json.loads(json.dumps(dataclasses.asdict(config))))
    if record.is_file():
        known = _flat(json.loads(record.read_text())["config"])
        free = tuple(PLACES)
        differing = {key for key in set(known) | set(values) if known.get(key) != values.get(key)}
        changed = sorted(key for key in differing if not key.startswith(free))
        if changed:
            shown = ", ".join(f"{key}: {known.get(key)!r} then, {values.get(key)!r} now" for key in changed[:5])
            raise ValueError(
                f"{folder} holds a run with other settings ({shown}): choose another output_dir, or delete the folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    content = {"config": dataclasses.asdict(config), **provenance()}
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(record)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _build_trainer(
    config: RunConfig, module: RetrofitModule, data: TextData, exporter: Exporter, run: TrainedRun
) -> Trainer:
    training, settings = config.training, config.trainer
    loggers: list[Any] = [CSVLogger(run.folder, name="logs")]
    if config.logger.wandb_project is not None:
        loggers.append(
            WandbLogger(project=config.logger.wandb_project, save_dir=run.folder, offline=config.logger.wandb_offline)
        )
    callbacks = [
        TQDMProgressBar(refresh_rate=training.log_every_steps),
        Throughput(training.tokens_per_step),
        Validation(data.validation_batches(), run.folder / "heatmaps", training.validate_every_steps),
        Snapshots(
            module.plan.snapshot_steps(training.snapshot_ratios) if config.has_gates else {},
            lambda model, ratio: exporter.write(model, run.snapshots[ratio], ratio),
        ),
        SaveLast(run.folder / "checkpoints", training.checkpoint_every_steps),
    ]
    trainer = Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        strategy=settings.strategy,
        precision=settings.precision,
        max_steps=module.plan.total_steps,
        max_epochs=1,
        gradient_clip_val=training.gradient_clip,
        logger=loggers,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=training.log_every_steps,
        default_root_dir=run.folder,
    )
    trainer.accumulate_grad_batches = training.accumulation(trainer.world_size)
    return trainer
