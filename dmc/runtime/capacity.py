"""How many requests fit into a GPU: the bytes of weights, passes and caches, by compression ratio, without a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dmc.budget import check_ratio, whole
from dmc.kernels.layout import FIRST_TABLE_BLOCKS, CacheLayout
from dmc.runtime.memory import AUTO_FRACTION, Activations

PASS_TOKENS = 2048
"""Of the largest pass: the engine's default `token_budget`."""


@dataclass(frozen=True)
class Capacity:
    """What one rank holds at one compression ratio."""

    ratio: float
    request_bytes: int
    """Of one request with the whole context in its cache: whole blocks, tables, ring and sums."""
    requests: int
    """Held at once; 0: not one fits."""
    longest: int
    """Tokens of the longest request that fits alone; 0: none."""


def slots_after(layout: CacheLayout, num_tokens: int, ratio: float) -> int:
    """Entries in the pages of each head of a request at a compression ratio: floor(n / CR), delayed tokens included.

    Raises:
        ValueError: the ratio is below 1.
    """
    return max(1, max(1, whole(num_tokens / check_ratio(ratio))) - min(layout.delay, num_tokens))


def request_bytes(layout: CacheLayout, num_tokens: int, ratio: float, block_size: int = 16) -> int:
    """Bytes that the cache of one request takes on one rank: what `GenerationStats.bytes_allocated` says of it.

    Every head is taken to hold as much: floor(n / CR) entries, those that wait for their decision included. Heads that
    differ need up to half a block more each, on average.

    Args:
        layout: of the cache.
        num_tokens: n, fed in passes of `PASS_TOKENS`.
        ratio: CR >= 1 at the end.
        block_size: slots of a block.
    Raises:
        ValueError: the ratio is below 1.
    """
    slots = slots_after(layout, num_tokens, ratio)
    heads, width = layout.num_layers * layout.num_kv_heads, FIRST_TABLE_BLOCKS
    for fed in (*range(PASS_TOKENS, num_tokens, PASS_TOKENS), num_tokens):  # a table has room for a head that keeps all
        wanted = -(-fed // block_size)
        width = width if wanted <= width else max(wanted, 2 * width)
    rows = 0
    for field in layout.fields:
        if field.per == "row":
            shape = (*field.shape[:-1], width) if field.name == "block_tables" else field.shape
            layers = layout.num_layers if field.num_layers is None else field.num_layers
            rows += layers * math.prod(shape) * field.dtype.itemsize
    return heads * -(-slots // block_size) * layout.block_bytes(block_size) + rows


def capacities(
    config: Any, layout: CacheLayout, weights: int, memory: int, context: int, ratios: list[float], block_size: int = 16
) -> list[Capacity]:
    """Tell for each compression ratio how many requests of `context` tokens one rank holds.

    Args:
        config: of a transformers causal LM.
        layout: of its cache on one rank.
        weights: bytes of this rank's weights.
        memory: bytes of the GPU; as under `memory="auto"`, 0.85 of what the weights leave is used.
        context: tokens of prompt and answer.
        ratios: CR >= 1 each.
        block_size: slots of a block.
    """
    usable = int(AUTO_FRACTION["cuda"] * (memory - weights))
    pages = Activations.of(config, layout, PASS_TOKENS, PASS_TOKENS).room(usable) if usable > 0 else 0
    found = []
    for ratio in ratios:
        each = request_bytes(layout, context, ratio, block_size)
        low, high = 0, 2**24
        while low < high:  # the longest, by bisection
            middle = (low + high + 1) // 2
            fits = request_bytes(layout, middle, ratio, block_size) <= pages
            low, high = (middle, high) if fits else (low, middle - 1)
        found.append(Capacity(ratio, each, max(0, pages // each), low))
    return found
