"""What the gates of a model decide on text, and the compression ratios that follow: by head, length and position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from dmc.compression import GateMode, GateTrace, held_fraction
from dmc.measure import evaluating
from dmc.ranks import ALONE


@dataclass(frozen=True)
class Decisions:
    """Thresholded decisions on sequences of equal length; the first token of each is never merged."""

    merged: Tensor
    """Whether a token is merged into the slot before it, or dropped, bool [L, B, H, T]."""
    delay: int
    """Tokens that a decision waits; the last ones of a sequence are held whatever was decided."""

    def ratio_by_head(self) -> Tensor:
        """Compression ratio at the end of a sequence, [L, H]: the paper's figure 6."""
        return 1 / held_fraction(self.merged.float(), delay=self.delay).mean(1)

    def ratio_over_length(self, lengths: Sequence[int]) -> Tensor:
        """Compression ratio of each layer after so many tokens, [len(lengths), L]."""
        beginnings = (self.merged[..., :length].float() for length in lengths)
        return torch.stack([1 / held_fraction(each, delay=self.delay).mean((1, 2)) for each in beginnings])

    def decision_over_position(self) -> Tensor:
        """Share of the heads and sequences in which the token at a position is merged, [L, T]."""
        return self.merged.float().mean((1, 2))

    def segment_lengths(self) -> Tensor:
        """Count segments of tokens whose decision has been executed, by layer and length, int64 [L, longest + 1]."""
        size = max(0, self.merged.shape[-1] - self.delay)
        rows = [segment_lengths_of(layer[..., :size]) for layer in self.merged]
        longest = max((int(row.max()) for row in rows if len(row)), default=0)
        return torch.stack([torch.bincount(row, minlength=longest + 1) for row in rows])


def segment_lengths_of(merged: Tensor) -> Tensor:
    """List the lengths of segments: a token that is kept, and the ones behind it that are merged or dropped.

    Args:
        merged: bool [..., T], False at the first token.
    Returns:
        Tokens of each segment, the one that the end cuts off included, int64 [number of segments].
    """
    starts = ~merged.flatten(0, -2)
    ends = torch.ones_like(starts[:, :1])
    places = torch.cat((starts, ends), dim=1).nonzero()  # of each start, and of each sequence's end
    gaps = places[1:, 1] - places[:-1, 1]
    return gaps[places[1:, 0] == places[:-1, 0]]


def collect_decisions(model: Any, batches: Iterable[Tensor], title: str | None = None) -> Decisions:
    """Run the parallel form over sequences of equal length.

    Args:
        model: compressed causal LM.
        batches: token ids, each [B, T].
        title: of a progress bar; None: none.
    Raises:
        ValueError: the model has no gates.
    """
    compression = getattr(model, "compression", None)
    if compression is None:
        raise ValueError(f"{type(model).__name__} has no gates: give a model that was retrofitted, or a policy")
    found = []
    with evaluating(model):
        for input_ids in tqdm(batches, title, disable=None if title else True):
            trace = GateTrace(getattr(model, "ranks", ALONE))
            model(input_ids.to(model.device), use_cache=False, logits_to_keep=1, gate_mode=GateMode(), gate_trace=trace)
            found.append(trace.stacked_alpha().bool().cpu())
    merged = torch.cat(found, dim=1)
    merged[..., 0] = False
    return Decisions(merged, compression.delay)
