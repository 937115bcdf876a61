"""One training run from configuration to exported folder; finished parts are reused, a killed run resumes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from lightning import Trainer, seed_everything
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import CONFIG_NAME

from dmc.config.instantiate import instantiate
from dmc.data.numbering import num_ids
from dmc.files import locked, refuse_occupied
from dmc.models import retrofit
from dmc.ranks import is_first_of_node, is_rank_zero
from dmc.training.callbacks.adapter_init import AdapterInit
from dmc.training.callbacks.preemption import Preemption
from dmc.training.callbacks.progress_bar import StepProgressBar
from dmc.training.callbacks.save_last import SaveLast
from dmc.training.callbacks.teacher_check import TeacherCheck
from dmc.training.callbacks.throughput import Throughput
from dmc.training.callbacks.validation import Validation
from dmc.training.checkpoints import FOLDER_NAME, check_fits, find_checkpoint, read_header, saved_checkpoints
from dmc.training.config import RunConfig
from dmc.training.export import FINAL_NAME, Exporter
from dmc.training.flight_recorder import flight_recorder
from dmc.training.loggers import open_loggers
from dmc.training.model_folder import METRICS_NAME, check_push, is_final, push
from dmc.training.module import RetrofitModule
from dmc.training.optimizer_step import OptimizerStep
from dmc.training.planning.start_checks import check_start
from dmc.training.record import CONFIG_NAME as RUN_NAME
from dmc.training.record import check_branch, check_same_run, check_same_text, record_run, record_start
from dmc.training.stages import Plan
from dmc.training.strategies import build_strategy
from dmc.training.strategies.devices import devices_per_node
from dmc.training.teacher import OwnBase, Teacher
from dmc.training.text_data import TextData, build_tokenizer, fetched, text_digests, weight_digests

LOCK_NAME = ".lock"
RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Variables that are above 0 in a start that Slurm or torchrun has restarted."""
LOCK_SECONDS = 120.0
"""How long such a start waits for the lock: a file server keeps that of a node that died for a while."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """Files of a finished run."""

    folder: Path
    """The run's output folder."""
    final: Path
    """Exported model after the last step."""
    snapshots: dict[float, Path]
    """Exported models along the ramp, by target ratio."""

    @property
    def is_finished(self) -> bool:
        """Whether the model of the last step is exported, with all of its weights."""
        return is_final(self.final)

    def metrics(self, folder: Path) -> dict[str, Any]:
        """Return the metrics measured when `folder` was exported."""
        return json.loads((folder / METRICS_NAME).read_text())["metrics"]


def fresh_model(config: RunConfig, vocab_size: int, seed: int) -> Any:
    """Make a model with random weights and `vocab_size` tokens."""
    seed_everything(seed, verbose=False)
    shape = AutoConfig.for_model(**{"vocab_size": vocab_size, **config.base.shape})
    return AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, config.dtype))


def _keep_quiet() -> None:
    """Silence device tables, tips, shard counters, and warnings about which a user can do nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")  # Lightning calls torch so
    warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
    if "SLURM_JOB_ID" not in os.environ:
        warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used.*")
    warnings.filterwarnings("ignore", message="Total length of `StepLoader` across ranks is zero.*")  # only a fit
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of the run in `folder` against other starts; rank 0 holds it for all of its ranks.

    Raises:
        BlockingIOError: another start holds it; nothing is touched.
    """
    with ExitStack() as stack:
        if is_rank_zero():
            made = [place for place in (folder, *folder.parents) if not place.exists()]
            is_run = (folder / LOCK_NAME).exists()
            folder.mkdir(parents=True, exist_ok=True)
            try:
                is_restart = any(int(os.environ.get(name, 0)) > 0 for name in RESTART_COUNTS)
                stack.enter_context(locked(folder / LOCK_NAME, LOCK_SECONDS if is_restart else 0))
            except BlockingIOError as error:
                raise BlockingIOError(
                    f"{folder} is being trained: {error}. Wait until that start ends, or stop it, and the same command "
                    "goes on; or choose another output_dir"
                ) from None
            if not is_run:
                stack.callback(_remove_unstarted, folder, made)
        yield


def _remove_unstarted(folder: Path, made: list[Path]) -> None:
    """Remove the lock of a run that did not start, and the folders that were made for it."""
    if not (folder / RUN_NAME).exists():
        (folder / LOCK_NAME).unlink()
        with suppress(OSError):
            for place in made:
                place.rmdir()


def train(config: RunConfig) -> TrainedRun:
    """Train, validate, snapshot, calibrate and export one run, and upload it if `training.push_to_hub` says so.

    A finished run is returned unchanged; an unfinished one resumes at the step after its last checkpoint, with the same
    data order and noise, and one with `training.branch_from` begins at that milestone of another run. With several
    processes all call this; rank 0 writes.

    Raises:
        ValueError, NotImplementedError: the run cannot start, see `check_start`; the output folder holds a run with
            other settings, or a damaged or foreign checkpoint.
        BlockingIOError: another process trains the run.
        FileExistsError: other files are in the way of an exported model.
        OSError: a checkpoint or a model could not be written; the one before it stays. Or the model could not be
            uploaded.
        PreemptedError: a signal stopped the run; its state is saved.
        NonFiniteError: too many steps in a row had a loss or gradient that is not finite; the state is saved.
    """
    repository = config.training.push_to_hub
    if repository is not None:
        check_push(repository)
    run = _train(config)
    if repository is not None and is_rank_zero():  # what the hub has already is not uploaded again
        logger.info("uploaded to %s", push(run.final, repository))
    return run


def _train(config: RunConfig) -> TrainedRun:
    """Train and export, or return the finished run."""
    folder = Path(config.output_dir)
    plan = Plan(config.training, config.target_ratio, config.compression)
    ratios = plan.snapshot_steps(config.training.snapshot_ratios) if config.has_gates else ()
    run = TrainedRun(folder, folder / FINAL_NAME, {ratio: folder / "snapshots" / f"cr{ratio:g}" for ratio in ratios})
    is_finished = run.is_finished
    if not is_finished:
        check_start(config, devices_per_node(config))
    with nullcontext() if is_finished else _alone_in(folder):
        check_same_run(folder, config)
        if run.is_finished:
            check_same_text(folder, weight_digests(config) if is_first_of_node() else {})
            logger.info("%s is finished; reused", folder)
            return run
        _keep_quiet()
        milestones = config.training.milestones
        save_last = SaveLast(
            folder / FOLDER_NAME,
            config.training.checkpoint_every_steps,
            {f"cr{ratio:g}": step for ratio, step in plan.ratio_steps(milestones.ratios).items()},
            milestones.every_steps,
        )
        preempted = Preemption(save_last, OptimizerStep(plan, config.training))
        with open_loggers(config) as loggers, preempted as preemption:
            _fit(config, plan, run, preemption, loggers)
    return run


def _fit(config: RunConfig, plan: Plan, run: TrainedRun, preemption: Preemption, loggers: list[Logger]) -> None:
    """Train from the last checkpoint to the end and export."""
    branches = config.training.branch_from is not None and not saved_checkpoints(preemption.save_last.folder)
    if branches:
        check_branch(config, plan)
    local = fetched(config)
    text = text_digests(local) | weight_digests(local) if is_first_of_node() else {}
    check_same_text(run.folder, text, Path(str(config.training.branch_from)).parents[1] if branches else None)
    seed_everything(config.seed, verbose=False)
    tokenizer = build_tokenizer(local)
    strategy = build_strategy(local)
    is_fresh = local.model is None
    model = fresh_model(config, num_ids(tokenizer), config.seed) if is_fresh else strategy.load(str(local.model))
    base_type = model.config.model_type
    if config.gates is not None:
        model = retrofit(model, config.gates)
    model.train()  # a loaded model is in eval mode, in which transformers recomputes no activations
    data = TextData(config, tokenizer, plan.total_steps)
    module = RetrofitModule(model, local, strategy)
    if local.distillation is not None:
        module.teacher = _teacher(local, strategy, model, base_type)
    exporter = Exporter(config, data, tokenizer, strategy, run.snapshots)
    trainer = _build_trainer(module, exporter, preemption, loggers)
    checkpoint = find_checkpoint(preemption.save_last.folder, config.use_previous_checkpoint, model)
    if branches:
        checkpoint = Path(str(config.training.branch_from))
        check_fits(checkpoint, model)
    step = 0 if checkpoint is None else read_header(checkpoint).global_step
    ahead = [run.snapshots[ratio] for ratio, at in plan.snapshot_steps([*run.snapshots]).items() if at > step]
    for place in (run.final, *ahead):
        refuse_occupied(place, overwrite=True, marker=CONFIG_NAME)  # rather now than at the end
    if is_first_of_node():
        data.check()
    if is_rank_zero():
        record_run(run.folder, config, text)
        record_start(run.folder, step)
    for run_logger in loggers:
        run_logger.log_hyperparams(dataclasses.asdict(config))
    with flight_recorder(run.folder) if trainer.world_size > 1 else nullcontext():
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        if trainer.global_step != plan.total_steps:
            raise ValueError(
                f"{run.folder}: the text ended after step {trainer.global_step} of {plan.total_steps}: nothing is "
                "exported"
            )
        module.model.to(trainer.strategy.root_device)  # Lightning has moved it to the CPU
        exporter.write(module.model, run.final, config.target_ratio, step=trainer.global_step)
        trainer.strategy.barrier("export")


def _teacher(config: RunConfig, strategy: Any, student: Any, base_type: str) -> Teacher:
    """Make the teacher of a run, loaded once more unless the student is its own."""
    settings = config.distillation
    assert settings is not None
    path = settings.path or str(config.model)
    if config.learns_from_its_base(base_type):
        return OwnBase(student, path, settings.temperature, settings.direction)
    return Teacher(strategy.load(path, is_teacher=True), path, settings.temperature, settings.direction)


def warn_of_idle_tensor_cores(device: torch.device, precision: str) -> None:
    """Say that float32 uses a small part of a GPU."""
    if device.type == "cuda" and precision == "32-true":
        logger.warning("trainer.precision=32-true leaves the GPU's tensor cores idle: set trainer.precision=bf16-mixed")


def _build_trainer(
    module: RetrofitModule, exporter: Exporter, preemption: Preemption, loggers: list[Logger]
) -> Trainer:
    """Make the trainer of a run, with what acts after a step in its order: saving comes after all else.

    Raises:
        ValueError: the batch cannot be divided among the devices, or this machine has no such devices.
    """
    config, strategy, optimizer_step = module.config, cast(Any, module.strategy), preemption.optimizer_step
    training, settings, folder = config.training, config.trainer, Path(config.output_dir)
    calibration, validation = (partial(exporter.data.held_out, split) for split in ("calibration", "validation"))
    callbacks: list[Callback] = [Throughput(config, optimizer_step), TeacherCheck(validation)]
    for start in (training.sensitivity_init, training.regression_init) if module.has_gates else ():
        callbacks += [] if start is None else [AdapterInit(start, calibration, folder)]
    if settings.lightning.get("enable_progress_bar", True):
        callbacks.append(StepProgressBar(optimizer_step, training.log_every_steps))
    callbacks += [Validation(validation, folder / "heatmaps", training.validate_every_steps), exporter]
    others = [instantiate(settings, f"callbacks.{name}", Callback) for name, settings in config.callbacks.items()]
    callbacks += [*others, preemption.save_last, preemption, optimizer_step]
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
            max_steps=optimizer_step.plan.total_steps,
            max_epochs=1,
            logger=loggers,
            callbacks=callbacks,
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
    warn_of_idle_tensor_cores(trainer.strategy.root_device, settings.precision)
    training.accumulation(trainer.world_size // settings.devices_per_sequence)
    return trainer
