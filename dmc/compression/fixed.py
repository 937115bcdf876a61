"""Fixed Memory Pooling: decisions by position alone, which merge every CR tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def fixed_decisions(positions: Tensor, ratio: float) -> Tensor:
    """Tell whether each token is merged under Fixed Memory Pooling (a baseline of DMC, arXiv:2403.09636).

    alpha_t = 0 if t = 0 or floor(t / CR) != floor((t - 1) / CR), else 1: CR 4 gives 0111 0111, CR 2.5 gives 0110101101.

    Args:
        positions: position t of each token in its sequence or document, int64, any shape.
        ratio: compression ratio CR >= 1, an integer or not.
    Returns:
        bool, shape of `positions`.
    """
    places = positions.double()  # in float32 two devices may round a position at a group's border differently
    return (positions > 0) & (torch.floor(places / ratio) == torch.floor((places - 1) / ratio))


def positions_since(starts: Tensor) -> Tensor:
    """Count tokens from the last start on, 0 at a start; True at starts, bool [B, T] -> int64 [B, T]."""
    places = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
    return places - places.where(starts, 0).cummax(-1).values
