"""The checkpoint a run goes on from or that is exported: found, checked, read, from the files of any strategy."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from dmc.checksums import damaged_entry
from dmc.models.build import assemble
from dmc.training.checkpoints.folder import (
    MODEL_CONFIG,
    REMEDY,
    Header,
    damage_in,
    offer,
    read_folder_header,
    whole_shape,
)
from dmc.training.checkpoints.generations import LAST_CHECKPOINT, PREVIOUS_CHECKPOINT
from dmc.training.checkpoints.joining import PREFIX, join_shards, join_slices
from dmc.training.checkpoints.trust import TAG

logger = logging.getLogger(__name__)


def find_checkpoint(folder: Path, model: Any, format: str = "file", use_previous: bool = False) -> Path | None:
    """Choose the checkpoint that a run goes on from: `last.ckpt`, or `previous.ckpt` where there is no last.

    Args:
        folder: holds the checkpoints.
        model: the checkpoint must fit it.
        format: what the run's strategy writes and reads.
        use_previous: take `previous.ckpt` also where `last.ckpt` is damaged; to know, all of a folder is read, which
            else each rank does with its own part when it loads it.
    Returns:
        None: there is none.
    Raises:
        ValueError: the checkpoint is damaged, of another model or of another strategy; the message offers the previous
            one if that is good.
    """

    def check(path: Path) -> Header:
        header = check_fits(path, model, format)
        return check_whole(path, header) if use_previous or path.is_file() else header

    return choose(folder, check, use_previous)


def choose(folder: Path, check: Callable[[Path], Header], use_previous: bool) -> Path | None:
    """Choose between the last checkpoint and the one before, see `find_checkpoint`.

    Args:
        folder: holds the checkpoints.
        check: raises ValueError or FileNotFoundError for a checkpoint that cannot be used.
        use_previous: see `find_checkpoint`.
    """
    last, previous = folder / LAST_CHECKPOINT, folder / PREVIOUS_CHECKPOINT
    if not last.exists():
        last, previous = previous, last
    if not last.exists():
        return None
    try:
        check(last)
        return last
    except ValueError as error:
        try:
            step = check(previous).global_step
        except (ValueError, FileNotFoundError):
            raise error from None
        if not use_previous:
            raise ValueError(f"{error}; or {offer(previous, step)}") from error
        logger.warning("%s; going on from %s at step %d", error, previous, step)
        return previous


def read_header(path: Path) -> Header:
    """Read what a training checkpoint holds, not its weights; tensors and plain values only.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is cut off, is no checkpoint, or holds code.
    """
    if path.is_dir():
        return read_folder_header(path)
    checkpoint = _read_file(path)
    shapes = {name.removeprefix(PREFIX): list(value.shape) for name, value in checkpoint["state_dict"].items()}
    return Header("file", 1, checkpoint["global_step"], checkpoint[MODEL_CONFIG], shapes)


def check_whole(path: Path, header: Header | None = None) -> Header:
    """Read all of a training checkpoint and compare it with its checksums; return its header.

    Raises:
        FileNotFoundError, ValueError: see `read_header`; or bytes are not what was written.
    """
    header = header or read_header(path)
    if path.is_file():
        entry = damaged_entry(path)
        damage = None if entry is None else f"{entry} has a wrong checksum"
    else:
        damage = damage_in(path, header, header.checksums)
        if not header.checksums:
            logger.warning("%s has no checksums, an earlier version wrote it: its bytes are not checked", path)
    if damage is not None:
        raise ValueError(f"{path} is damaged: {damage}; {REMEDY}")
    return header


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the whole weights of a training checkpoint under the model's names, from the shards of any strategy.

    Raises:
        FileNotFoundError, ValueError: see `read_header`.
    """
    header = read_header(path)
    if header.format == "file":
        weights = _read_file(path)["state_dict"]
    elif header.format == "fsdp2":
        weights = join_shards(path)
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = join_slices(path / TAG, header.shapes)
        if weights is None:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(path), tag=TAG)
    return {name.removeprefix(PREFIX): value for name, value in weights.items()}


def load_checkpoint_model(path: Path) -> Any:
    """Rebuild the model of a checkpoint, stock or compressed.

    Raises:
        FileNotFoundError, ValueError: see `read_header`.
    """
    header = read_header(path)
    return assemble(AutoConfig.for_model(**header.model_config), read_weights(path))


def check_fits(path: Path, model: Any, format: str) -> Header:
    """Return the header of a checkpoint that a model can go on from.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, was written by another strategy, or a weight is missing, unexpected, or of another
            shape.
    """
    header = read_header(path)
    if header.format != format:
        raise ValueError(
            f"{path} was written as {header.format!r}, this run reads {format!r}: start with the "
            "trainer.strategy that it was trained with, or export it and train on from the exported folder"
        )
    stored = {name: tuple(shape) for name, shape in header.shapes.items()}
    expected = {name: whole_shape(value) for name, value in model.state_dict(keep_vars=True).items()}
    missing, unexpected = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit the model: {len(missing)} weights missing (first {missing[:1]}), "
            f"{len(unexpected)} unexpected (first {unexpected[:1]}); was it trained from another model?"
        )
    for name, shape in expected.items():
        if shape != stored[name]:
            raise ValueError(
                f"{path} does not fit the model: {name} has shape {stored[name]} in the checkpoint and {shape} in the "
                "model"
            )
    return header


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: name the last.ckpt of a run's checkpoints folder")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is cut off or is no training checkpoint ({type(error).__name__}): {REMEDY}"
        ) from error
    expected = {"state_dict", "global_step", MODEL_CONFIG}
    if not isinstance(checkpoint, dict) or not expected <= set(checkpoint):
        raise ValueError(f"{path} is no training checkpoint: {', '.join(sorted(expected))} are expected in it")
    return checkpoint
