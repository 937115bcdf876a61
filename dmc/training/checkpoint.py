"""Checkpoints that are never torn: written beside their place, flushed, renamed; read with weights only."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from transformers import AutoConfig, AutoModelForCausalLM

from dmc.training.after_step import AfterStep

LAST_CHECKPOINT = "last.ckpt"
PREVIOUS_CHECKPOINT = "previous.ckpt"
MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in a checkpoint."""


logger = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Replaces a checkpoint by renaming, so that a kill or a full disk leaves the one before.

    The one before stays as `previous.ckpt`, unless this process has neither written nor read it: then it may be
    damaged, and must not take the place of a good one.
    """

    def __init__(self) -> None:
        self._whole: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            OSError: it could not be written; what was at `path` is still there.
        """
        target = Path(str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if target in self._whole:  # between these renames there is only previous.ckpt: `find_checkpoint` takes it
                os.replace(target, target.with_name(PREVIOUS_CHECKPOINT))
            os.replace(partial, target)
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"{target} could not be written ({error}): the checkpoint before it stays; make room on the disk and "
                "start the same command again"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        self._whole.add(target)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint as Lightning does."""
        checkpoint = super().load_checkpoint(path, *arguments, **options)
        self._whole.add(Path(str(path)))
        return checkpoint


class SaveLast(AfterStep):
    """Saves `last.ckpt` every so many optimizer steps, and at the last one.

    Args:
        folder: where the checkpoint lies.
        every_steps: optimizer steps between two.
    """

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.folder, self.every_steps = folder, every_steps
        self._saved_step = -1

    def after_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Save after a step whose turn it is."""
        if step % self.every_steps == 0 or step == trainer.max_steps:
            self.save(trainer, step)

    def save(self, trainer: Trainer, step: int) -> None:
        """Save now, unless this step is saved; rank 0 writes and all wait."""
        if step != self._saved_step:
            self._saved_step = step
            trainer.save_checkpoint(self.folder / LAST_CHECKPOINT, weights_only=False)


def find_checkpoint(folder: Path, model: Any, use_previous: bool = False) -> Path | None:
    """Choose the checkpoint that a run goes on from: `last.ckpt`, or `previous.ckpt` where there is no last.

    Args:
        folder: holds the checkpoints.
        model: the checkpoint must fit it.
        use_previous: take `previous.ckpt` also where `last.ckpt` is damaged.
    Returns:
        None: there is none.
    Raises:
        ValueError: the checkpoint is damaged or of another model; the message offers the previous one if that is good.
    """
    last, previous = folder / LAST_CHECKPOINT, folder / PREVIOUS_CHECKPOINT
    if not last.exists():
        last, previous = previous, last
    if not last.exists():
        return None
    try:
        check_weights(model, read_checkpoint(last), last)
        return last
    except ValueError as error:
        try:
            checkpoint = read_checkpoint(previous)
            check_weights(model, checkpoint, previous)
        except (ValueError, FileNotFoundError):
            raise error from None
        if not use_previous:
            raise ValueError(
                f"{error}; or start again with use_previous_checkpoint=true to go on from step "
                f"{checkpoint['global_step']}, which {previous} holds"
            ) from error
        logger.warning("%s; going on from %s at step %d", error, previous, checkpoint["global_step"])
        return previous


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a training checkpoint, tensors and plain values only.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is cut off, is no checkpoint, or holds code.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: name the last.ckpt of a run's checkpoints folder")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is cut off or is no training checkpoint ({type(error).__name__}): "
            "put back a copy, or delete the run to start over"
        ) from error
    expected = {"state_dict", "global_step", MODEL_CONFIG}
    if not isinstance(checkpoint, dict) or not expected <= set(checkpoint):
        raise ValueError(f"{path} is no training checkpoint: {', '.join(sorted(expected))} are expected in it")
    return checkpoint


def load_checkpoint_model(path: Path) -> Any:
    """Rebuild the model of a checkpoint, stock or compressed.

    Raises:
        FileNotFoundError, ValueError: see `read_checkpoint` and `load_weights`.
    """
    checkpoint = read_checkpoint(path)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint[MODEL_CONFIG]))
    load_weights(model, checkpoint, path)
    return model


def load_weights(model: Any, checkpoint: dict[str, Any], path: Path) -> None:
    """Put a checkpoint's weights into a model of the same shape.

    Raises:
        ValueError: see `check_weights`.
    """
    model.load_state_dict(check_weights(model, checkpoint, path))


def check_weights(model: Any, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint's weights under the names of the model.

    Raises:
        ValueError: a weight is missing, unexpected, or of another shape.
    """
    prefix = "model."
    weights = {name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items()}
    expected = model.state_dict()
    missing, unexpected = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit the model: {len(missing)} weights missing (first {missing[:1]}), "
            f"{len(unexpected)} unexpected (first {unexpected[:1]}); was it trained from another model?"
        )
    for name, value in expected.items():
        if value.shape != weights[name].shape:
            raise ValueError(
                f"{path} does not fit the model: {name} has shape {tuple(weights[name].shape)} in the checkpoint and "
                f"{tuple(value.shape)} in the model"
            )
    return weights
