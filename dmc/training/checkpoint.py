"""Checkpoints that are never torn: written beside their place, flushed, renamed; read with weights only."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from transformers import AutoConfig, AutoModelForCausalLM

LAST_CHECKPOINT = "last.ckpt"
MODEL_CONFIG = "model_config"
"""Key of the Hugging Face configuration in a checkpoint."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Replaces a checkpoint in one rename, so that a kill or a full disk leaves the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`."""
        target = Path(str(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


class SaveLast(Callback):
    """Saves `last.ckpt` every so many optimizer steps, and at the last one.

    Args:
        folder: where the checkpoint lies.
        every_steps: optimizer steps between two.
    """

    def __init__(self, folder: Path, every_steps: int) -> None:
        self.path, self.every_steps = folder / LAST_CHECKPOINT, every_steps
        self._saved_step = -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save after an optimizer step whose turn it is."""
        step = trainer.global_step
        if step != self._saved_step and (step % self.every_steps == 0 or step == trainer.max_steps):
            self._saved_step = step
            if step:
                trainer.save_checkpoint(self.path, weights_only=False)


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
            "put back a copy, or delete it to start over"
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
    model.load_state_dict(weights)
