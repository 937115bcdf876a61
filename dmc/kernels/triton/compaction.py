"""Close the gaps that eviction leaves: move the kept slots within each head's own pages, and free blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.triton.tile import load_rows, places

MOVED_TOGETHER = 32
"""Number of slots that a program moves at once."""


def compact(cache: LayerCache, rows: Tensor, keep: Tensor) -> None:
    """See `dmc.kernels.reference.compact`; no host sync."""
    sequences, kv_heads, num_slots = keep.shape
    num_pairs = sequences * kv_heads
    kept = cache.lengths.new_empty(sequences, kv_heads)
    released = torch.empty_like(kept)
    constants = {"KV_HEADS": kv_heads, "BLOCK_SIZE": cache.block_size}
    with torch.cuda.device_of(keep):
        for pages in cache.slot_pages:
            _move_kernel[(num_pairs,)](
                rows,
                keep.contiguous(),
                cache.lengths,
                cache.block_tables,
                pages,
                kept,
                released,
                num_slots,
                cache.block_tables.shape[-1],
                WIDTH=pages.stride(1),
                CHANNELS=triton.next_power_of_2(pages.stride(1)),
                SLOTS=MOVED_TOGETHER,
                **constants,
            )
        _release_kernel[(num_pairs,)](
            rows,
            cache.lengths,
            cache.block_tables,
            cache.free_blocks,
            cache.num_free,
            released,
            num_pairs,
            cache.block_tables.shape[-1],
            PAIRS=triton.next_power_of_2(num_pairs),
            BLOCKS=128,
            **constants,
        )
    cache.lengths[rows] = kept
    cache.num_free += released.sum(dtype=released.dtype)


@triton.jit
def _move_kernel(
    rows,
    keep,
    lengths,
    block_tables,
    pages,
    kept,
    released,
    num_slots,
    num_blocks,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Move one field of one head's kept slots down, in order; count them and the blocks that become free."""
    pair = tl.program_id(0).to(tl.int64)
    cell = tl.load(rows + pair // KV_HEADS) * KV_HEADS + pair % KV_HEADS
    length = tl.load(lengths + cell)
    table = block_tables + cell * num_blocks
    channel = tl.arange(0, CHANNELS)
    count = tl.zeros((), dtype=tl.int32)
    for start in range(0, length, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        stays = (tl.load(keep + pair * num_slots + slot, mask=slot < length, other=0) != 0).to(tl.int32)
        target = count + tl.cumsum(stays, 0) - stays
        moves = (stays != 0) & (target != slot)
        target_place = places(table, target, moves, BLOCK_SIZE) * WIDTH
        states = load_rows(pages, places(table, slot, moves, BLOCK_SIZE) * WIDTH, moves, channel, WIDTH)
        tl.debug_barrier()  # a target may be a source of the same tile, but never of a later one
        written = moves[:, None] & (channel < WIDTH)[None, :]
        tl.store(pages + target_place[:, None] + channel[None, :], states, mask=written)
        tl.debug_barrier()
        count += tl.sum(stays, 0)
    tl.store(kept + pair, count)
    tl.store(released + pair, tl.cdiv(length, BLOCK_SIZE) - tl.cdiv(count, BLOCK_SIZE))


@triton.jit
def _release_kernel(
    rows,
    lengths,
    block_tables,
    free_blocks,
    num_free,
    released,
    num_pairs,
    num_blocks,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Push one head's freed blocks onto the free stack, above those of the heads before it."""
    pair = tl.program_id(0)
    cell = tl.load(rows + pair // KV_HEADS) * KV_HEADS + pair % KV_HEADS
    every = tl.arange(0, PAIRS)
    before = tl.sum(tl.load(released + every, mask=every < pair, other=0), 0)
    own = tl.load(released + pair)
    first = tl.cdiv(tl.load(lengths + cell), BLOCK_SIZE) - own
    height = tl.load(num_free) + before
    for start in range(0, own, BLOCKS):
        index = start + tl.arange(0, BLOCKS)
        block = tl.load(block_tables + cell * num_blocks + first + index, mask=index < own, other=0)
        tl.store(free_blocks + height + index, block, mask=index < own)
