"""What a run asks of the way its weights lie over the ranks."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from dmc.config import Precision, RunConfig
from dmc.models import load_model, merge_kv_heads
from dmc.models.weights import empty_model
from dmc.ranks import Ranks
from dmc.training.checkpoints.folder import SHARDED, Header, check_whole_together
from dmc.training.checkpoints.rotation import offer_previous
from dmc.training.checkpoints.saving import CheckpointSaver
from dmc.training.gradients import gradient_norm


class Parallelism:
    """The answers for a model that is whole on each rank; strategies of Lightning inherit and change them.

    Args:
        config: the run.
    """

    format = SHARDED
    """How a checkpoint is written and read: `SHARDED`, or the name of a DeepSpeed strategy."""
    precision: Precision
    """What Lightning does about precision."""
    clips_in_optimizer = False
    """Whether gradients are clipped, and those that are not finite discarded, inside the optimizer's step."""
    holds_parts = False
    """Whether no rank ever holds the whole model."""

    def __init__(self, config: RunConfig) -> None:
        self.run_config = config
        self.precision = config.trainer.precision
        self.saver = CheckpointSaver()

    @cached_property
    def hosts(self) -> Ranks:
        """The ranks by their CPUs, for what need not wait for a device; all of them ask for it together."""
        return Ranks.on_hosts()

    def load(self) -> Any:
        """Load the model that the run starts from; without weights until `parallelize` where ranks hold parts."""
        settings = self.run_config.model
        model = self._load(str(settings.path))
        return model if settings.merge_kv_heads is None else merge_kv_heads(model, settings.merge_kv_heads)

    def load_teacher(self, path: str) -> Any:
        """Load a model to be learned from; without weights until `parallelize_teacher` where ranks hold parts."""
        return self._load(path)

    def _load(self, path: str) -> Any:
        dtype = getattr(torch, self.run_config.model.dtype)
        if self.holds_parts:
            return empty_model(path, dtype, self.revision_of(path))
        return load_model(path, dtype=dtype, revision=self.revision_of(path))

    def parallelize(self, module: LightningModule) -> None:
        """Lay the model of `module` over the ranks, once these can talk to each other."""

    def parallelize_teacher(self, model: Any, path: str, module: LightningModule) -> None:
        """Lay the teacher, loaded from `path`, over the ranks."""
        model.to(module.trainer.strategy.root_device)

    def revision_of(self, path: str) -> str | None:
        """Hub revision of a model: the run's own where it is the model that the run starts from."""
        return self.run_config.model.revision if path == self.run_config.model.path else None

    def set_rows(self, parameter: nn.Parameter, rows: slice, values: Tensor | float) -> None:
        """Set rows of a weight or bias, counted over all ranks; the optimizer goes on from there."""
        parameter.data[rows] = torch.as_tensor(values).to(parameter)

    def gradient_norm(self, module: LightningModule) -> Tensor:
        """Norm over all gradients before clipping, a scalar; with `clips_in_optimizer` that of the step just done."""
        return gradient_norm(module)

    def check_saved(self, folder: Path, group: Any = None) -> Header:
        """Read all of a checkpoint on all ranks together, and compare it with its checksums.

        Raises:
            ValueError: it is damaged; on all ranks.
        """
        try:
            return check_whole_together(folder, group)
        except ValueError as error:
            raise ValueError(f"{error}{offer_previous(folder)}") from error

    def gather(self, model: Any) -> Any:
        """Return the whole model on rank 0 and None elsewhere; called by all ranks."""
        return model
