"""Every rank holds the whole model: one device, or data parallel over several."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from dmc.config import Precision, RunConfig
from dmc.models import load_model, merge_kv_heads
from dmc.training.gradients import gradient_norm


class WholeModel:
    """What a run asks of the way its weights lie over the ranks; this one: whole on each.

    Args:
        config: the run.
    """

    format = "file"
    """How a checkpoint is written and read: one file, or a folder of each rank's shards by the strategy's name."""
    precision: Precision
    """What Lightning does about precision."""
    owns_gradients = False
    """Whether gradients are clipped, and those that are not finite discarded, inside the optimizer's step."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.precision = config.trainer.precision

    def lightning_strategy(self) -> Any:
        """Strategy for `lightning.Trainer`: its name or an object."""
        return self.config.trainer.strategy

    def load(self) -> Any:
        """Load the model that the run starts from; it may have no weights before `spread`."""
        settings = self.config.model
        model = load_model(settings.path, dtype=getattr(torch, settings.dtype), revision=settings.revision)
        return self.with_merged_heads(model)

    def with_merged_heads(self, model: Any) -> Any:
        """Merge the KV heads of the model that the run starts from, if they are to be."""
        count = self.config.model.merge_kv_heads
        return model if count is None else merge_kv_heads(model, count)

    def spread(self, module: LightningModule) -> None:
        """Lay the model of `module` over the ranks, once these can talk to each other."""

    def load_teacher(self, path: str) -> Any:
        """Load a model to be learned from; it may have no weights before `spread_teacher`."""
        return load_model(path, dtype=getattr(torch, self.config.model.dtype), revision=self.revision_of(path))

    def spread_teacher(self, model: Any, path: str, module: LightningModule) -> None:
        """Lay the teacher, loaded from `path`, over the ranks."""
        model.to(module.trainer.strategy.root_device)

    def revision_of(self, path: str) -> str | None:
        """Hub revision of a model: the run's own where it is the model that the run starts from."""
        return self.config.model.revision if path == self.config.model.path else None

    def set_rows(self, parameter: nn.Parameter, rows: slice, values: Tensor | float) -> None:
        """Set rows of a weight or bias, counted over all ranks; the optimizer goes on from there."""
        parameter.data[rows] = torch.as_tensor(values).to(parameter)

    def gradient_norm(self, module: LightningModule) -> Tensor:
        """Norm over all gradients before clipping, a scalar; with `owns_gradients` that of the step just done."""
        return gradient_norm(module)

    def gather(self, model: Any) -> Any:
        """Return the whole model on rank 0 and None elsewhere; called by all ranks."""
        return model
