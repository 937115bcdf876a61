"""The checkpoints that a run keeps: how and when they are written, which ones stay, and which one it goes on from.

A checkpoint is written beside its place, in the background. A finished one gets its name by one rename, and the oldest
is removed after that, so that at every moment there is a complete one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from transformers import AutoConfig

from dmc.models.build import assemble
from dmc.ranks import ALONE, Ranks
from dmc.training.callbacks.steps import AfterStep
from dmc.training.checkpoints.folder import (
    WEIGHTS,
    Header,
    check_fits,
    check_whole,
    naming,
    on_every_rank,
    read_header,
    read_tensors,
    write_header,
)

FOLDER_NAME = "checkpoints"
"""Of a run's last checkpoints, in its output folder."""
MILESTONES_NAME = "milestones"
"""Of those that are kept for good."""
STEP = re.compile(r"step_(\d+)$")
logger = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """Name the folder of a checkpoint."""
    return f"step_{step:07d}"


def saved_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, the newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if STEP.match(path.name)), key=lambda path: int(path.name[5:]), reverse=True)


def find_checkpoint(folder: Path, use_previous: bool = False, model: Any = None) -> Path | None:
    """Choose the checkpoint to resume from, or to export: the last one.

    Args:
        folder: holds the checkpoints.
        use_previous: take the previous one if the last is damaged.
        model: goes on from it, and must fit it; its ranks read all of the checkpoint when they load it. None: any
            model; all is read here, as it is with `use_previous`.
    Returns:
        None: there is none.
    Raises:
        ValueError: the checkpoint is damaged, or of another model; the message offers the previous one if that is good.
    """

    def check(path: Path) -> Header:
        header = read_header(path) if model is None else check_fits(path, model)
        return check_whole(path) if use_previous or model is None else header

    last = next(iter(saved_checkpoints(folder)), None)
    if last is None:
        return None
    try:
        check(last)
        return last
    except ValueError as error:
        offer, previous = offer_previous(last, check)
        if not use_previous or previous is None:
            raise ValueError(f"{error}{offer}") from error
        logger.warning("%s; going on from %s", error, previous)
        return previous


def offer_previous(folder: Path, check: Callable[[Path], Header] = read_header) -> tuple[str, Path | None]:
    """Return a hint how to take the previous checkpoint, and that one, if it passes a check."""
    before = next((path for path in saved_checkpoints(folder.parent) if path.name < folder.name), None)
    with suppress(ValueError, FileNotFoundError):
        if before is not None:
            step = check(before).global_step
            hint = f"use_previous_checkpoint=true to go on from step {step}, which {before} holds"
            return f"; or start again with {hint}", before
    return "", None


def load_checkpoint_model(folder: Path) -> Any:
    """Rebuild the model of a checkpoint, stock or compressed, in this process."""
    header = read_header(folder)
    return assemble(AutoConfig.for_model(**header.model_config), read_tensors(folder, WEIGHTS))


def load_last_model(run_folder: Path, use_previous: bool = False) -> tuple[Any, int]:
    """Rebuild the model of a run's last checkpoint; also return its number of optimizer steps.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint, or a damaged one, see `find_checkpoint`.
    """
    folder = run_folder / FOLDER_NAME
    checkpoint = find_checkpoint(folder, use_previous)
    if checkpoint is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint: nothing is saved yet")
    return load_checkpoint_model(checkpoint), read_header(checkpoint).global_step


def remove(path: Path) -> None:
    """Delete a folder if it exists."""
    shutil.rmtree(path, ignore_errors=True)  # what cannot be removed is no error of what has been written


class CheckpointSaver:
    """Writes checkpoints in the background, one after the other; `wait` waits for the last one."""

    def __init__(self) -> None:
        self.valid: set[Path] = set()
        """Checkpoints that this process has written or read."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def save(self, target: Path, header: Header, write: Callable[[Path], Future], ranks: Ranks = ALONE) -> None:
        """Begin to write a checkpoint; called by all ranks.

        Args:
            target: a folder that all ranks can see.
            header: header of the checkpoint.
            write: called with the folder to write into; its future is done when all is written.
            ranks: all of them, in a process group without other communication meanwhile.
        Raises:
            OSError: this one, or the one before, could not be written; what was there still is.
        """
        self.wait()
        target = Path(ranks.all_gather_object(str(target))[0])
        partial = target.with_name(f"{target.name}.partial")

        def make_room() -> None:
            if ranks.rank == 0:
                remove(partial)
                partial.mkdir(parents=True)

        with naming(target, "the checkpoint before it"):
            on_every_rank(make_room, ranks)
            writing = write(partial)  # from here on it communicates by itself
        self._pending = self._thread.submit(self._finish, writing, target, partial, header, ranks)

    def wait(self) -> None:
        """Wait until what was begun is on the disk; raise the OSError for which it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _finish(self, writing: Future, target: Path, partial: Path, header: Header, ranks: Ranks) -> None:
        with naming(target, "the checkpoint before it"):
            on_every_rank(lambda: writing.exception() and writing.result(), ranks)
            write_header(partial, header, ranks)
            on_every_rank(lambda: self.commit(partial, target) if ranks.rank == 0 else None, ranks)
        self.valid.add(target)

    def commit(self, partial: Path, target: Path) -> None:
        """Rename `partial`, which is complete, to `target`, and remove the checkpoints that it replaces.

        The one before stays, unless it is not in `valid`: then it may be damaged, and a good one before it stays
        instead, if there is one. What is whole is never replaced by the same step again: between two names there would
        be none.
        """
        if target in self.valid and target.exists():
            remove(partial)
            return
        remove(target)  # of this very step, and damaged: the run went on from one before it
        os.replace(partial, target)
        self.valid.add(target)
        if target.parent.name == MILESTONES_NAME:  # these are kept
            return
        found = [each for each in saved_checkpoints(target.parent) if each in self.valid or each.name < target.name]
        kept = sorted(found, key=lambda path: path not in self.valid)[:2]
        for path in target.parent.iterdir():
            if STEP.match(path.name.removesuffix(".partial")) and path not in kept:
                remove(path)


class SaveLast(AfterStep):
    """Saves a checkpoint every `every_steps` optimizer steps and at the last one, and milestones.

    Args:
        folder: of the last checkpoints; milestones lie beside it.
        every_steps: optimizer steps between two.
        milestones: name of a milestone -> step after which it is kept.
        milestones_every: optimizer steps between two more milestones, which have the names of their steps; None: none.
    """

    def __init__(
        self,
        folder: Path,
        every_steps: int,
        milestones: dict[str, int] | None = None,
        milestones_every: int | None = None,
    ) -> None:
        self.folder, self.every_steps = folder, every_steps
        self.milestones, self.milestones_every = milestones or {}, milestones_every
        self._saved_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the step that the run resumes from, which is saved already."""
        super().on_train_start(trainer, pl_module)
        if trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve().parent == self.folder.resolve():
            self._saved_step = trainer.global_step

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Start saving if the step is due."""
        names = [name for name, at in self.milestones.items() if at == step]
        names += [step_name(step)] if self.milestones_every and step % self.milestones_every == 0 else []
        for name in names:
            milestone = self.folder.with_name(MILESTONES_NAME) / name
            if not trainer.strategy.broadcast(milestone.exists()):  # a step that was done twice
                trainer.save_checkpoint(milestone, weights_only=False)
        if step % self.every_steps == 0 or step == trainer.max_steps:
            self._begin(trainer, step)

    def save(self, trainer: Trainer, step: int) -> None:
        """Save now, unless this step is saved, and wait until it is on disk."""
        self._begin(trainer, step)
        self.teardown(trainer)

    def teardown(self, trainer: Any, pl_module: Any = None, stage: str = "fit") -> None:
        """Wait for the last checkpoint."""
        trainer.strategy.saver.wait()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Finish the checkpoint that is being written, if possible."""
        with suppress(OSError, RuntimeError):  # RuntimeError: another rank is gone
            self.teardown(trainer)

    def _begin(self, trainer: Trainer, step: int) -> None:
        if step != self._saved_step:
            self._saved_step = step
            trainer.save_checkpoint(self.folder / step_name(step), weights_only=False)
