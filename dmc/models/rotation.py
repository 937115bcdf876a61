"""How a family rotates: the order of a head's channels in which channel i turns with i + D/2, and its tables to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Convention of a family's `apply_rotary_pos_emb`, and the order by halves that gates, cache and kernels share.

    Of a head's D channels the first R rotate, as many as the family's tables have columns. In the order by halves the
    first R/2 places hold the first channel of each pair, the fastest first; channels that do not rotate follow, up to
    D/2; their partners fill the second half. Its last place, from which gates borrow by default, is the head's last
    channel in every convention: where R < D it does not rotate, else it is of the pair that rotates slowest.
    """

    neighbors: bool
    """Whether channel 2i rotates with 2i + 1; else i with i + R/2."""
    repeats: bool
    """Whether the columns of the family's tables have each angle twice in turn; else all angles, then all again."""
    has_half_tables: bool = False
    """Whether the family's tables have each angle once."""

    @classmethod
    def of(cls, apply: Callable[..., Any]) -> Rotation:
        """Find out what a stock `apply_rotary_pos_emb` turns with what, by the turn of a head of 8 channels.

        Raises:
            ValueError: neither halves nor neighbors.
        """
        try:
            apply(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 8))
        except RuntimeError:  # of another number of columns
            double = cls.of(lambda query, key, cos, sin: apply(query, key, cos[..., :4], sin[..., :4]))
            return replace(double, has_half_tables=True)
        channels = torch.arange(8.0).view(1, 1, 1, 8)
        zeros, ones = torch.zeros(1, 1, 8), torch.ones(1, 1, 8)
        turned = apply(channels, channels, zeros, ones)[1].flatten().tolist()
        columns = apply(ones[None], ones[None], channels[0], zeros)[1].flatten().tolist()
        for neighbors, expected in ((False, [-4, -5, -6, -7, 0, 1, 2, 3]), (True, [-1, 0, -3, 2, -5, 4, -7, 6])):
            if turned == expected:
                return cls(neighbors, repeats=neighbors and columns[2] == 2)
        raise ValueError(f"channels 0 to 7 of a head turn into {turned}")

    def whole(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the family's cos and sin with as many columns, [B or 1, T, R], as channels rotate."""
        cos, sin = rotary
        return (cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)) if self.has_half_tables else rotary

    def _order(self, head_dim: int, rotated: int) -> list[slice]:
        """Return the channels of the places by halves, as slices of a head."""
        half, resting = rotated // 2, (head_dim + rotated) // 2
        pairs = slice(0, rotated, 2), slice(1, rotated, 2)
        first, second = pairs if self.neighbors else (slice(0, half), slice(half, rotated))
        return [first, slice(rotated, resting), second, slice(resting, head_dim)]

    def channel(self, place: int, head_dim: int, rotated: int) -> int:
        """Return which of a head's channels is at a place of the order by halves."""
        channels = range(head_dim)
        return [channel for part in self._order(head_dim, rotated) for channel in channels[part]][place]

    def by_halves(self, states: Tensor, rotated: int) -> Tensor:
        """Put queries or keys, [..., D], the first `rotated` channels of which rotate, in the order by halves."""
        head_dim = states.shape[-1]
        if not self.neighbors and rotated == head_dim:
            return states
        return torch.cat([states[..., part] for part in self._order(head_dim, rotated)], -1)

    def tables(self, rotary: tuple[Tensor, Tensor], head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Turn the family's cos and sin, [B or 1, T, R], into those of the order by halves, [B or 1, T, D]."""
        rotated = rotary[0].shape[-1]
        if not self.neighbors and rotated == head_dim:
            return rotary[0].to(dtype), rotary[1].to(dtype)
        angles = slice(0, None, 2) if self.repeats else slice(0, rotated // 2)
        padding = 0, (head_dim - rotated) // 2
        cos, sin = (
            F.pad(table[..., angles].to(dtype), padding, value=value).repeat(1, 1, 2)
            for table, value in zip(rotary, (1.0, 0.0), strict=True)
        )
        return cos, sin
