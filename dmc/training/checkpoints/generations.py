"""The last checkpoint and the one before it: a finished one takes its place by renaming, never by overwriting."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

LAST_CHECKPOINT = "last.ckpt"
PREVIOUS_CHECKPOINT = "previous.ckpt"


class Generations:
    """Puts finished checkpoints, files or folders, in the place of the last one.

    The one before stays as `previous.ckpt`, unless this process has neither written nor read it: then it may be
    damaged, and must not take the place of a good one.
    """

    def __init__(self) -> None:
        self._whole: set[Path] = set()

    def promote(self, partial: Path, target: Path) -> None:
        """Rename `partial`, which is complete, to `target`."""
        if target in self._whole:
            _keep(target, target.with_name(PREVIOUS_CHECKPOINT))
        _replace(partial, target)
        self._whole.add(target)

    def known(self, target: Path) -> None:
        """Take note that the checkpoint at `target` could be read."""
        self._whole.add(target)


def latest(folder: Path) -> Path:
    """Name the last checkpoint in `folder`: the one before it where a kill has left only that."""
    last, previous = folder / LAST_CHECKPOINT, folder / PREVIOUS_CHECKPOINT
    return previous if previous.exists() and not last.exists() else last


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _keep(last: Path, previous: Path) -> None:
    """Give a file a second name, so that who reads `last` always finds it.

    A folder, or a file on a disk without links, is renamed: then for a moment there is only `previous`, which
    `find_checkpoint` takes.
    """
    linked = previous.with_name(f"{previous.name}.linked")
    remove(linked)
    try:
        os.link(last, linked)
    except OSError:
        _replace(last, previous)
    else:
        _replace(linked, previous)


def _replace(source: Path, target: Path) -> None:
    """Rename over a file; a folder cannot be renamed over, and steps aside first."""
    retired = target.with_name(f"{target.name}.retired")
    if target.is_dir() or (source.is_dir() and target.exists()):
        remove(retired)
        os.replace(target, retired)
    os.replace(source, target)
    remove(retired)
