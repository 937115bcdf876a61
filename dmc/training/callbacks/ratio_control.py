"""The weight of the compression-ratio loss, led by how far the cache is from the size asked for."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dmc.config import RatioControlConfig


class RatioControl(Callback):
    """Keeps the achieved ratio on its ramp: log(weight) integrates the relative excess of the cache.

    A cache larger than asked for raises the weight step by step, a smaller one (where the one-sided loss is 0) lowers
    it. Its state is one number, in the checkpoint; between checkpoints the host never reads it.

    Args:
        weight: at the start.
        settings: gain and bounds; None: the weight stays.
    """

    def __init__(self, weight: float, settings: RatioControlConfig | None) -> None:
        self.weight: float | Tensor = weight
        self.settings = settings

    def state_dict(self) -> dict[str, Any]:
        """Keep the weight in the checkpoint."""
        return {"weight": float(self.weight)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the weight."""
        self.weight = state_dict["weight"]

    def update(self, held: Tensor, target_ratio: float) -> None:
        """Learn what a step held; called by all ranks with the same figures.

        Args:
            held: share of the tokens that the relaxed decisions kept, over layers, heads and the whole batch, float64.
            target_ratio: CR asked for, >= 1.
        """
        if self.settings is None:
            return
        weight = self.weight * torch.exp(self.settings.gain * (held * target_ratio - 1))
        weight = weight.clamp(1 / self.settings.max_weight, self.settings.max_weight)
        self.weight = torch.where(held.isfinite(), weight, self.weight)
