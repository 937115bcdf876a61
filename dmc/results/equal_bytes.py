"""Find the compression ratio at which a method takes as many bytes as another, by measuring without interpolation.

A budget `bytes:NAME` requests the bytes of the grid's compressed model NAME (or of the model of a variant's same seed),
`bytes:0.25` that share of the full cache's; `bytes` alone those of every compressed model of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dmc.results.measurement import Row

SAME_BYTES = 1.02
"""Largest factor between mean bytes per token that count as equal."""
WHOLE_PAGES = 1.15
"""If whole pages allow no budget so near, the next larger one is used, up to this factor: this favors the method."""
TRIES, FINE = 8, 0.005
"""Maximum number of measurements, and relative resolution of ratios."""
KIND = "bytes"


def bytes_budget(budget: object) -> str | None:
    """Parse a budget in bytes: a name, a share, or "" for every compressed model; None: another kind of budget.

    Raises:
        ValueError: a share is not between 0 and 1.
    """
    kind, _, whose = str(budget).partition(":")
    if kind != KIND:
        return None
    if (share := share_of(whose)) is not None and not 0 < share < 1:
        raise ValueError(f"budget={budget!r}: expected a share of the full cache's bytes between 0 and 1, or a model")
    return whose


def share_of(whose: str) -> float | None:
    """Parse a share of the full cache's bytes; None: it is a name."""
    try:
        return float(whose)
    except ValueError:
        return None


def asked_of(row: Any) -> str:
    """Format a method's budget: CR 4, 128 tokens, bytes of retrofit, 25% of the bytes, or the full cache."""
    if row["is_full"]:
        return "full cache"
    kind, _, number = str(row["budget"]).partition(":")
    if kind == "tokens":
        return f"{number} tokens"
    if kind == KIND:
        return f"bytes of {number}" if (share := share_of(number)) is None else f"{share:.4g} of the bytes"
    return f"CR {row['requested_ratio']:g}"


def at_bytes(measure: Callable[[float], Row], wanted: float, first: float, reached: float | None = None) -> Row:
    """Measure at successive compression ratios until the bytes match `wanted`.

    Args:
        measure: returns a finished row at a ratio, with `mean_bytes_allocated_per_token` over the scored positions.
        wanted: bytes per token.
        first: ratio of the first try; as long as it leaves no room for what the method must keep, half of it is next.
        reached: bytes per token at `first` of some of the samples, which allow nothing nearer: if all samples hold as
            many, neither do they.
    Returns:
        A row with its ratio as `requested_ratio`: within `SAME_BYTES` of the wanted bytes if there is such a ratio, or
        else with the fewest above them, which favors the method.
    Raises:
        ValueError: the method has no room at any ratio.
    """
    sizes: dict[float, float] = {}
    rows: list[Row] = []
    share = 1 / max(1.0, first)
    while len(rows) < TRIES:
        try:
            rows.append(measure(1 / share) | {"requested_ratio": 1 / share})
        except ValueError:
            if rows:
                break
            if share == 1:
                raise
            share = min(1.0, 2 * share)
            continue
        sizes[share] = _bytes(rows[-1]) / wanted
        if reached is not None and abs(math.log(sizes[share] * wanted / reached)) < FINE:
            break
        if any(size == sizes[share] and not 0.5 <= other / share <= 2 for other, size in sizes.items()):
            break  # the budget has no say: nothing, or nothing but the shortest prompt, is left to it
        if 1 / SAME_BYTES <= sizes[share] <= SAME_BYTES or (share := _next(sizes)) in sizes:
            break
    return min(rows, key=lambda row: _distance(_bytes(row) / wanted))


def _next(sizes: dict[float, float]) -> float:
    """Choose the next share to keep; `sizes` are bytes over the wanted ones, by share, in the order of tries.

    They grow with the share, nearly as a power of it, in steps of whole pages.
    """
    below = max((share for share, size in sizes.items() if size < 1), default=None)
    above = min((share for share, size in sizes.items() if size >= 1), default=None)
    if below is not None and above is not None:
        low, high = math.log(sizes[below]), math.log(sizes[above])
        place = min(max(-low / (high - low), 0.1), 0.9)  # of steps the same end would stay for ever
        near = above / below < 1 + FINE
        return above if near else float(below * (above / below) ** place)
    *_, last = sizes
    slopes = [math.log(sizes[last] / size) / math.log(last / share) for share, size in sizes.items() if share != last]
    return min(1.0, float(last * sizes[last] ** (-1 / min(max(slopes[-1] if slopes else 1.0, 0.2), 5.0))))


def _distance(size: float) -> tuple[int, float]:
    if 1 / SAME_BYTES <= size <= SAME_BYTES:
        return 0, abs(math.log(size))
    return (1, size) if size >= 1 else (2, 1 / size)


def _bytes(row: Row) -> float:
    return float(row["mean_bytes_allocated_per_token"])
