"""Tokens, ratios, slots and bytes: the only compression-ratio arithmetic. A compression ratio (CR) is always >= 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def check_ratio(ratio: float, name: str = "ratio") -> float:
    """Return `ratio` as a float.

    Raises:
        ValueError: it is not a finite number >= 1.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not math.isfinite(ratio) or ratio < 1:
        raise ValueError(
            f"{name}={ratio!r} is not a compression ratio: expected a number >= 1 (4 keeps a quarter of the entries)"
        )
    return float(ratio)


def achieved_ratio(tokens_seen: int, num_layers: int, num_kv_heads: int, total_slots: float) -> float:
    """Return the ratio of a cache that holds `total_slots` entries over all layers and KV heads for `tokens_seen`."""
    return tokens_seen * num_layers * num_kv_heads / max(total_slots, 1e-9)


def sequence_ratio(ratio: float, num_tokens: int, windows: Sequence[int | None]) -> float:
    """Return the ratio of all keys and values of a sequence, of which some layers keep no more than their windows.

    Args:
        ratio: of the layers without a window.
        num_tokens: tokens seen.
        windows: of each layer the most tokens it keeps; None: all of them, or as few as `ratio` says.
    """
    kept = sum(min(num_tokens, window) for window in windows if window is not None)
    of_full = num_tokens * windows.count(None)
    return (of_full + kept) / (of_full / check_ratio(ratio) + kept)


ROUNDING = 1e-9
"""Added to a share before it is rounded down: 33 / 1.1 is 29.999999999999996."""


def rounded_down(share: float) -> int:
    """Round a share down, but to the nearest integer within rounding errors."""
    return math.floor(share + ROUNDING)


@dataclass(frozen=True)
class Budget:
    """Entries that each KV head may hold: a share of all tokens that a session has seen, or a fixed number.

    Args:
        ratio: compression ratio >= 1; the budget is max(1, floor(n / ratio)) for n tokens.
        tokens: fixed number of entries >= 1.
    Raises:
        ValueError: both or neither are given, or the value is out of range.
    """

    ratio: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.tokens is None):
            raise ValueError(
                f"Budget(ratio={self.ratio!r}, tokens={self.tokens!r}): give exactly one, ratio=4.0 or tokens=128"
            )
        if self.ratio is not None:
            check_ratio(self.ratio)
        elif isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"Budget(tokens={self.tokens!r}): expected a whole number >= 1")

    def entries(self, num_tokens: int) -> int:
        """Return the entries allowed per KV head for `num_tokens` tokens."""
        if self.tokens is not None:
            return self.tokens
        assert self.ratio is not None
        return max(1, rounded_down(num_tokens / self.ratio))
