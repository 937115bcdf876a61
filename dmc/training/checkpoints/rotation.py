"""The checkpoints that a run keeps, by their steps: the last two; and which of them it goes on from.

A finished one gets its name by one rename, and the oldest is removed after that: whoever looks finds a whole one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from dmc.training.checkpoints.folder import SHARDED, Header, check_fits, check_whole, read_header

FOLDER_NAME = "checkpoints"
"""Of a run's last checkpoints, in its output folder."""
MILESTONES_NAME = "milestones"
"""Of those that are kept for good."""
STEP = re.compile(r"step_(\d+)$")
EARLIER = ("last.ckpt", "previous.ckpt")
"""What earlier versions wrote."""
logger = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """Name the folder of a checkpoint."""
    return f"step_{step:07d}"


def saved_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, the newest first.

    Raises:
        ValueError: an earlier version has written there.
    """
    if not folder.is_dir():
        return []
    paths = list(folder.iterdir())
    found = {int(match[1]): path for path in paths if (match := STEP.match(path.name))}
    if not found and any(path.name in EARLIER for path in paths):
        raise ValueError(
            f"{folder} holds checkpoints of an earlier version, which this one does not read: finish the run with "
            "that version, or choose another output_dir"
        )
    return [found[step] for step in sorted(found, reverse=True)]


def find_checkpoint(folder: Path, use_previous: bool = False, model: Any = None, format: str = SHARDED) -> Path | None:
    """Choose the checkpoint to go on from, or to export: the last one.

    Args:
        folder: holds the checkpoints.
        use_previous: take the one before where the last is damaged.
        model: goes on from it, and must fit it; its ranks read all of the checkpoint when they load it. None: any
            model; all is read here, as it is with `use_previous`.
        format: what the model's strategy writes and reads.
    Returns:
        None: there is none.
    Raises:
        ValueError: the checkpoint is damaged, of another model or of another format; the message offers the previous
            one if that is good.
    """

    def check(path: Path) -> Header:
        header = read_header(path) if model is None else check_fits(path, model, format)
        return check_whole(path) if use_previous or model is None else header

    last, previous = [*saved_checkpoints(folder), None, None][:2]
    if last is None:
        return None
    try:
        check(last)
        return last
    except ValueError as error:
        try:
            step = check(previous).global_step if previous is not None else None
        except (ValueError, FileNotFoundError):
            step = None
        if step is None:
            raise
        if not use_previous:
            raise ValueError(f"{error}; or {_offer(previous, step)}") from error
        logger.warning("%s; going on from %s at step %d", error, previous, step)
        return previous


def offer_previous(folder: Path) -> str:
    """Say, where there is one, how to take the checkpoint before `folder`."""
    before = [path for path in saved_checkpoints(folder.parent) if path.name < folder.name]
    try:
        return f"; or {_offer(before[0], read_header(before[0]).global_step)}" if before else ""
    except (ValueError, FileNotFoundError):
        return ""


def _offer(previous: Path | None, step: int) -> str:
    return f"start again with use_previous_checkpoint=true to go on from step {step}, which {previous} holds"


class CheckpointRotation:
    """Gives finished checkpoints their names and removes the ones that they replace.

    The one before stays, unless this process has neither written nor read it: then it may be damaged, and a good one
    before it stays instead, if there is one. What is whole is never replaced by the same step again: between two names
    there would be none.
    """

    def __init__(self) -> None:
        self._valid: set[Path] = set()

    def commit(self, partial: Path, target: Path) -> None:
        """Rename `partial`, which is complete, to `target`."""
        if target in self._valid and target.exists():
            remove(partial)
            return
        remove(target)  # of this very step, and damaged: the run went on from one before it
        os.replace(partial, target)
        self._valid.add(target)
        if target.parent.name == MILESTONES_NAME:  # these are kept
            return
        found = [each for each in saved_checkpoints(target.parent) if each in self._valid or each.name < target.name]
        kept = sorted(found, key=lambda path: path not in self._valid)[:2]
        for path in target.parent.iterdir():
            if STEP.match(path.name.removesuffix(".partial")) and path not in kept:
                remove(path)

    def mark_valid(self, folder: Path) -> None:
        """Take note that a checkpoint could be read."""
        self._valid.add(folder)


def remove(path: Path) -> None:
    """Delete a folder, if it is there."""
    shutil.rmtree(path, ignore_errors=True)  # what cannot be removed is no error of what has been written
