"""The micro-batches of an optimizer step, as the loader groups them and the step reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dmc.models.attention import Documents
from dmc.models.token_losses import num_predicted
from dmc.ranks import Ranks


class StepLoader:
    """Groups a loader's micro-batches into optimizer steps: Lightning's batch is a step, a list of micro-batches.

    Args:
        loader: this rank's micro-batches.
        accumulation: micro-batches of a step.
        counts_tokens: whether each micro-batch gets `num_predicted`, see `share_predicted_tokens`.
        num_consumed: returns the samples of all ranks in the steps that are done; a loader with a state needs it.
    """

    def __init__(
        self,
        loader: Any,
        accumulation: int,
        counts_tokens: bool = False,
        num_consumed: Callable[[], int] = lambda: 0,
    ) -> None:
        self.loader, self.accumulation, self.counts_tokens = loader, accumulation, counts_tokens
        self.num_consumed = num_consumed

    def __len__(self) -> int:
        return len(self.loader) // self.accumulation

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last step done; empty where its order is a function of the step."""
        return self.loader.state_dict(self.num_consumed()) if hasattr(self.loader, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loader's state."""
        if hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        micro_batches = iter(self.loader)
        while step := list(itertools.islice(micro_batches, self.accumulation)):
            if self.counts_tokens and all("loss_mask" in micro_batch for micro_batch in step):
                count = torch.stack([num_predicted(micro_batch["loss_mask"]) for micro_batch in step]).mean()
                step = [micro_batch | {"num_predicted": count} for micro_batch in step]
            yield [host_batch(micro_batch) for micro_batch in step]


def host_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """Extract data that the host needs before the batch moves to the device, where reading it would wait."""
    batch = {**batch, "position": batch["position"].tolist()}
    if batch["input_ids"].ndim == 3:  # an item is several sequences: see `FactSequences`
        folds = batch["input_ids"].shape[1]
        batch |= {name: batch[name].flatten(0, 1) for name in ("input_ids", "loss_mask")}
        batch["position"] = [position * folds + fold for position in batch["position"] for fold in range(folds)]
    starts = batch.pop("document_starts", None)
    return batch | {"documents": None if starts is None else Documents.from_starts(starts)}


def share_predicted_tokens(micro_batches: list[dict[str, Any]]) -> None:
    """Average the number of predicted tokens of a micro-batch over the ranks: `token_mean` divides by it."""
    if "num_predicted" in micro_batches[0]:
        count = Ranks.world().all_reduce(micro_batches[0]["num_predicted"], "avg")
        for micro_batch in micro_batches:
            micro_batch["num_predicted"] = count
