"""Adapters that start from what compressing each head costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dmc.config import MeasuredStartConfig
from dmc.training.callbacks.heatmap import draw_cost_heatmap
from dmc.training.head_costs import decision_biases, measure_head_costs

COSTS_NAME = "head_costs.json"


class MeasuredStart(Callback):
    """Measures the heads once, before the first step of a new run, and sets the decision biases of the adapters.

    Args:
        open_batches: called once the text is there; returns token ids, each [B, T].
        settings: how much text, and how costs become biases.
        folder: where the costs are written, [L][H] nats per token.
    """

    def __init__(self, open_batches: Callable[[], list[Tensor]], settings: MeasuredStartConfig, folder: Path) -> None:
        self.open_batches, self.settings, self.folder = open_batches, settings, folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and set, on all ranks, with the figures of the first."""
        if trainer.ckpt_path is not None:
            return
        module: Any = pl_module
        model, settings = module.model, self.settings
        with trainer.precision_plugin.forward_context():
            measured = measure_head_costs(model, self._batches(), "cost of each head", module.documents_of)
        costs: Tensor = trainer.strategy.broadcast(measured)
        scale = model.compression.decision_scale
        for adapter, biases in zip(
            model.adapters(), decision_biases(costs, settings.spread, settings.floor) / scale, strict=True
        ):
            module.strategy.set_rows(adapter.bias, adapter.decision_rows, biases)
        if trainer.is_global_zero:
            (self.folder / COSTS_NAME).write_text(json.dumps({"nats_per_token": costs.tolist()}) + "\n")
            draw_cost_heatmap(costs, self.folder / "heatmaps" / "head_costs.png")

    def _batches(self) -> list[Tensor]:
        """Take as many whole batches as hold the sequences asked for."""
        batches = self.open_batches()
        size = batches[0].shape[0]
        sequences = torch.cat(batches)[: max(size, self.settings.sequences)]
        return list(sequences[: len(sequences) // size * size].split(size))
