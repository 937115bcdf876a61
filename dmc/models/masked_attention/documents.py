"""Where documents lie in a packed batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Documents:
    """Where documents lie in a packed batch, for attention, decisions and states that restart at each.

    Not frozen: with DeepSpeed, Lightning sets the tensors of a copy.
    """

    starts: Tensor
    """True at the first token of each document, [B, T]."""
    first: Tensor
    """Place of the first token of each token's document, int32 [B, T]."""
    end: Tensor
    """Place behind the last token of each token's document, int32 [B, T]."""

    @classmethod
    def from_starts(cls, starts: Tensor) -> Documents:
        """Find the documents by their first tokens, [B, T]; the start of a sequence starts one as well."""
        places = torch.arange(starts.shape[1], dtype=torch.int32, device=starts.device).expand(starts.shape)
        starts = starts | (places == 0)
        first = places.where(starts, 0).cummax(1).values
        following = places.where(starts, starts.shape[1]).roll(-1, 1)
        following[:, -1] = starts.shape[1]
        return cls(starts, first, following.flip(1).cummin(1).values.flip(1))

    @cached_property
    def bounds(self) -> list[list[tuple[int, int]]]:
        """First place of each document of each row, and the place behind its last; reads them from the device."""
        rows = [starts.nonzero()[:, 0].tolist() for starts in self.starts]
        return [list(zip(first, [*first[1:], self.starts.shape[1]], strict=True)) for first in rows]

    def to(self, device: Any) -> Documents:
        """Move the tensors to a device."""
        return Documents(*(tensor.to(device, non_blocking=True) for tensor in (self.starts, self.first, self.end)))
