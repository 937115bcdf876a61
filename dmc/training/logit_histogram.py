"""Histogram of decision logits: what the decisions of one pass tell of every other offset."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmc.ranks import Ranks

NUM_BINS = 2**20
"""Bins are the first 20 bits of a float32: 8 MB for any text, and a width of 2^-11 of the distance to the threshold."""
_BITS = 12
_UNIT = 2**36
"""Weight of a sequence: integers, whose sums are the same in any order, on any number of ranks."""


@dataclass
class LogitHistogram:
    """Decision logits of a text under one offset, each weighted by its share of its sequence.

    It is finest near the offset. What it says of another offset ignores that decisions change what later layers see.
    """

    offset: float
    """Offset under which the text was read; logits are what remains after its subtraction."""
    weights: Tensor = field(default_factory=lambda: torch.zeros(NUM_BINS, dtype=torch.int64))
    """Weight of each bin, in ascending order of the logits, [NUM_BINS]."""
    total: int = 0
    """Weight of all tokens, those included about which no offset decides."""

    def add(self, logits: Tensor, decided: Tensor, num_tokens: Tensor) -> None:
        """Count the logits of some sequences.

        Args:
            logits: [L, B, H, T].
            decided: True at tokens whose decision counts, [B, T].
            num_tokens: of each sequence, [B].
        """
        share = (_UNIT / num_tokens.double()).round().long()
        self.total += _UNIT * logits[:, :, :, 0].numel()
        counted = decided[None, :, None].expand(logits.shape) & logits.isfinite()
        weights = share[None, :, None, None].expand(logits.shape)[counted].cpu()
        self.weights.index_add_(0, _bins(logits[counted].float().cpu()), weights)

    def all_reduce(self, ranks: Ranks) -> None:
        """Add up what the ranks have counted."""
        self.weights, self.total = ranks.all_reduce(self.weights), ranks.all_reduce(self.total)

    def share_at(self, offset: float) -> float:
        """Return the share of tokens that an offset would hold."""
        lower, _, held = self._steps()
        return float(held[torch.searchsorted(lower, offset - self.offset)])

    def offset_for(self, share: float) -> float:
        """Return the offset that would hold a share of tokens as near to `share` as any, far from the next logits."""
        lower, upper, shares = self._steps()
        if not len(lower):
            return self.offset
        margin = upper[-1] - lower[0]  # beyond the last logit, for other decisions move the logits of later layers
        edges = torch.cat([lower[:1] - margin, (upper[:-1] + lower[1:]) / 2, upper[-1:] + margin])
        return self.offset + float(edges[(shares - share).abs().argmin()])

    def _steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the edges of the n bins with logits, and the share held with the threshold below each, [n + 1]."""
        bins = self.weights.nonzero()[:, 0]
        held = torch.nn.functional.pad(self.weights[bins].cumsum(0), (1, 0)).double()
        return _edges(bins), _edges(bins + 1), 1 + (held - held[-1]) / self.total


def _bins(logits: Tensor) -> Tensor:
    """Number the bins in the order of the logits; 0 merges nothing and belongs to the bin below it."""
    bits = logits.contiguous().view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).where(logits != 0, -1)
    return (keys >> _BITS).long() + NUM_BINS // 2


def _edges(bins: Tensor) -> Tensor:
    """Return the lower edge of each bin, float64."""
    keys = ((bins - NUM_BINS // 2) << _BITS).int()
    return torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32).double()
