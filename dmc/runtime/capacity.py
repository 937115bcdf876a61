"""Count the requests that fit into a GPU by compression ratio; the configuration suffices, no weight is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dmc.budget import check_ratio, rounded_down
from dmc.kernels.layout import FIRST_TABLE_BLOCKS, CacheLayout
from dmc.runtime.pool_size import AUTO_FRACTION, Activations

PASS_TOKENS = 2048
"""Tokens of the largest pass: the engine's default `token_budget`."""


@dataclass(frozen=True)
class Capacity:
    """What one rank holds at one compression ratio."""

    ratio: float
    request_bytes: int
    """Bytes of one request with the whole context in its cache: whole blocks, tables, ring and sums."""
    requests: int
    """Number of requests held at once; 0: not one fits."""
    longest: int
    """Tokens of the longest request that fits alone; 0: none fits."""


def slots_after(layout: CacheLayout, num_tokens: int, ratio: float) -> int:
    """Return the entries in each head's pages at a compression ratio: floor(n / CR) less the delayed tokens.

    Raises:
        ValueError: the ratio is below 1.
    """
    return max(1, max(1, rounded_down(num_tokens / check_ratio(ratio))) - min(layout.delay, num_tokens))


def request_bytes(layout: CacheLayout, num_tokens: int, ratio: float, block_size: int = 16) -> int:
    """Return the bytes that the cache of one request takes on one rank, as `GenerationStats.bytes_allocated` counts.

    Every head is assumed to hold the same floor(n / CR) entries, delayed tokens included. If heads differ, each needs
    up to half a block more on average.

    Args:
        layout: layout of the cache.
        num_tokens: n, computed in passes of `PASS_TOKENS`.
        ratio: CR >= 1 at the end.
        block_size: slots of a block.
    Raises:
        ValueError: the ratio is below 1.
    """
    slots = slots_after(layout, num_tokens, ratio)
    width, held = FIRST_TABLE_BLOCKS, layout.num_layers * -(-slots // block_size)
    held += sum(-(-min(num_tokens, ring) // block_size) for ring in layout.rings)
    for fed in (*range(PASS_TOKENS, num_tokens, PASS_TOKENS), num_tokens):  # a table has room for a head that keeps all
        wanted = -(-fed // block_size)
        width = width if wanted <= width else max(wanted, 2 * width)
    rows = 0
    for field in layout.fields:
        if field.per == "row":
            widths = {"block_tables": width, "ring_tables": layout.ring_blocks(block_size)}
            shape = (*field.shape[:-1], widths[field.name]) if field.name in widths else field.shape
            layers = layout.num_layers if field.num_layers is None else field.num_layers
            rows += layers * math.prod(shape) * field.dtype.itemsize
    return layout.num_kv_heads * held * layout.block_bytes(block_size) + rows


def capacities(
    config: Any, layout: CacheLayout, weights: int, memory: int, context: int, ratios: list[float], block_size: int = 16
) -> list[Capacity]:
    """Return for each compression ratio how many requests of `context` tokens one rank holds.

    Args:
        config: configuration of a transformers causal LM.
        layout: layout of its cache on one rank.
        weights: bytes of this rank's weights.
        memory: bytes of the GPU; as with `memory="auto"`, 0.85 of what the weights leave is used.
        context: tokens of prompt and answer together.
        ratios: compression ratios, each >= 1.
        block_size: slots of a block.
    """
    usable = int(AUTO_FRACTION["cuda"] * (memory - weights))
    pages = Activations.of(config, layout, PASS_TOKENS, PASS_TOKENS).room(usable) if usable > 0 else 0
    found = []
    for ratio in ratios:
        one = request_bytes(layout, context, ratio, block_size)
        low, high = 0, 2**24
        while low < high:  # find the longest request by bisection
            middle = (low + high + 1) // 2
            fits = request_bytes(layout, middle, ratio, block_size) <= pages
            low, high = (middle, high) if fits else (low, middle - 1)
        found.append(Capacity(ratio, one, max(0, pages // one), low))
    return found
