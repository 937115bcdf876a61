"""Every rank holds the whole model: one device, or data parallel over several."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule
from torch import nn

from dmc.config import RunConfig


class WholeModel:
    """What a run asks of the way its weights lie over the ranks; this one: whole on each.

    Args:
        config: the run.
    """

    format = "file"
    """How a checkpoint is written: a file, or a folder of each rank's shards."""
    readable_formats: tuple[str, ...] = ("file",)
    """Formats of checkpoints that a run can go on from."""
    precision: str
    """What Lightning does about precision."""
    exports_together = False
    """Whether all ranks must take part in a forward pass."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.precision = config.trainer.precision

    def lightning_strategy(self) -> Any:
        """Strategy for `lightning.Trainer`: its name or an object."""
        return self.config.trainer.strategy

    def spread(self, module: LightningModule) -> None:
        """Lay the model of `module` over the ranks, once these can talk to each other."""

    def zero_rows(self, parameter: nn.Parameter, rows: slice) -> None:
        """Set rows of a weight or bias, counted over all ranks, to exactly zero, for good."""
        parameter.data[rows] = 0

    def gather(self, model: Any) -> Any:
        """Return the whole model on rank 0 and None elsewhere; called by all ranks."""
        return model
