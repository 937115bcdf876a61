"""Micro-batches with the number of tokens that their step predicts, for averages over the tokens of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from dmc.models.token_losses import num_predicted


class CountedSteps:
    """Reads the micro-batches of a step before it hands out the first: a step's count is part of each one's loss.

    Where they have a `loss_mask`, they get `num_predicted`, the mean number of predicted tokens of the step's
    micro-batches on this rank, float64 []; without masks all predict equally many. Nothing is read beyond the step, so
    that a loader's state after it is that of the samples consumed.

    Args:
        loader: this rank's micro-batches.
        accumulation: micro-batches of a step.
    """

    def __init__(self, loader: Any, accumulation: int) -> None:
        self.loader, self.accumulation = loader, accumulation

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, which is empty where its order is a function of the step."""
        return self.loader.state_dict() if hasattr(self.loader, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loader's state."""
        if hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        micro_batches = iter(self.loader)
        while step := list(itertools.islice(micro_batches, self.accumulation)):
            if all("loss_mask" in each for each in step):
                number = torch.stack([num_predicted(each["loss_mask"]) for each in step]).mean()
                step = [each | {"num_predicted": number} for each in step]
            yield from step
