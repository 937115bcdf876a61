"""Adapters that start from what compressing each KV head alone costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from tqdm.auto import trange

from dmc.compression import GateMode
from dmc.config import MeasuredStartConfig
from dmc.measure import score_text
from dmc.models import CompressedCausalLM
from dmc.ranks import ALONE, Ranks
from dmc.training.callbacks.heatmap import draw_cost_heatmap

COSTS_NAME = "head_costs.json"


class InformedStart(Callback):
    """Sets the adapters once, before the first step of a new run, by what held-out text tells.

    Args:
        open_batches: called once the text is there; returns held-out text, see `score_text`.
        settings: how much text (`sequences`), and what it decides.
        folder: where the figures are written.
    """

    def __init__(self, open_batches: Callable[[], list[dict[str, Any]]], settings: Any, folder: Path) -> None:
        self.open_batches, self.settings, self.folder = open_batches, settings, folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the text on all ranks; nothing where a run goes on."""
        if trainer.ckpt_path is None:
            batches = self.open_batches()
            self.start(trainer, pl_module, batches[: max(1, self.settings.sequences // len(batches[0]["input_ids"]))])

    def start(self, trainer: Trainer, module: Any, batches: list[dict[str, Any]]) -> None:
        """Set the adapters; called by all ranks."""
        raise NotImplementedError


class MeasuredStart(InformedStart):
    """Measures the heads and sets the decision biases of the adapters; costs are written, [L][H] nats per token."""

    settings: MeasuredStartConfig

    def start(self, trainer: Trainer, module: Any, batches: list[dict[str, Any]]) -> None:
        """See `InformedStart.start`."""
        model, settings = module.model, self.settings
        with trainer.precision_plugin.forward_context():
            costs = measure_head_costs(model, batches, "cost of each head", Ranks.all())
        scale = model.compression.decision_scale
        for adapter, biases in zip(
            model.adapters(), decision_biases(costs, settings.spread, settings.floor) / scale, strict=True
        ):
            module.strategy.set_rows(adapter.bias, adapter.decision_rows, biases)
        if trainer.is_global_zero:
            (self.folder / COSTS_NAME).write_text(json.dumps({"nats_per_token": costs.tolist()}) + "\n")
            draw_cost_heatmap(costs, self.folder / "heatmaps" / "head_costs.png")


def measure_head_costs(
    model: CompressedCausalLM,
    batches: Sequence[Mapping[str, Any]],
    title: str | None = None,
    sharing: Ranks = ALONE,
) -> Tensor:
    """Measure what the loss gains when one head merges (or drops) every token it can and all others none.

    Args:
        model: its layers whole on this rank.
        batches: see `score_text`.
        title: of a progress bar; None: none.
        sharing: ranks that read a part of the batches each; all of them call this, and get the same.
    Returns:
        Nats per token, [L, H], on the CPU; noise makes some of them negative.
    """
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads

    def loss(compressed: tuple[tuple[int, int], ...]) -> float:
        return score_text(model, batches, sharing=sharing, gate_mode=GateMode(compressed_heads=compressed)).loss

    uncompressed, costs = loss(()), torch.zeros(layers, heads)
    for place in trange(layers * heads, desc=title, leave=False, disable=title is None or sharing.rank > 0):
        head = divmod(place, heads)
        costs[head] = loss((head,)) - uncompressed
    return costs


def decision_biases(costs: Tensor, spread: float, floor: float) -> Tensor:
    """Turn costs into decision biases: spread * (max z - z), z the standardised log(max(cost, floor * largest cost)).

    The head that costs most keeps its first logit, for a deeper one would hardly ever be sampled, and never learn.

    Args:
        costs: of each head, [L, H].
        spread: logits for each standard deviation.
        floor: share of the largest cost below which all count as equal.
    Returns:
        [L, H], >= 0; zeros where no head costs more than another.
    """
    largest = float(costs.max())
    if largest <= 0:
        return torch.zeros_like(costs)
    logs = costs.clamp(min=floor * largest).log()
    deviation = logs.std(correction=0)
    return spread * (logs.max() - logs) / deviation if deviation > 0 else torch.zeros_like(costs)
