"""Evict entries: move those that stay into the gaps, within each head's own pages, and free blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.triton.tile import load_rows, places

MOVED_TOGETHER = 32
"""Number of slots that a program moves at once."""
SHRUNK_TOGETHER = 256
"""Heads whose freed blocks are pushed at once: no number of sequences compiles a kernel of its own."""


def compact(cache: LayerCache, rows: Tensor, keep: Tensor) -> None:
    """See `dmc.kernels.reference.compact`; no host sync."""
    sequences, kv_heads, num_slots = keep.shape
    num_pairs = sequences * kv_heads
    kept = cache.lengths.new_empty(sequences, kv_heads)
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
                num_slots,
                cache.block_tables.shape[-1],
                WIDTH=pages.stride(1),
                CHANNELS=triton.next_power_of_2(pages.stride(1)),
                SLOTS=MOVED_TOGETHER,
                **constants,
            )
        _shrink(cache, rows, kept)


def evict(cache: LayerCache, rows: Tensor, slots: Tensor) -> None:
    """See `dmc.kernels.reference.evict`; no host sync."""
    slots, pages = slots.contiguous(), cache.slot_pages
    kept = cache.lengths.new_empty(slots.shape)
    widths = tuple(page.stride(1) for page in pages)
    with torch.cuda.device_of(slots):
        _move_last_kernel[(slots.numel(),)](
            rows,
            slots,
            cache.lengths,
            cache.block_tables,
            tuple(pages),
            kept,
            cache.block_tables.shape[-1],
            WIDTHS=widths,
            KV_HEADS=slots.shape[1],
            BLOCK_SIZE=cache.block_size,
            CHANNELS=triton.next_power_of_2(max(widths)),
        )
        _shrink(cache, rows, kept)


def _shrink(cache: LayerCache, rows: Tensor, kept: Tensor) -> None:
    _shrink_kernel[(1,)](
        rows,
        kept,
        cache.lengths,
        cache.block_tables,
        cache.free_blocks,
        cache.num_free,
        kept.numel(),
        cache.block_tables.shape[-1],
        KV_HEADS=kept.shape[1],
        BLOCK_SIZE=cache.block_size,
        PAIRS=SHRUNK_TOGETHER,
    )


@triton.jit
def _move_kernel(
    rows,
    keep,
    lengths,
    block_tables,
    pages,
    kept,
    num_slots,
    num_blocks,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Move one field of one head's kept slots down, in order, and count them."""
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


@triton.jit
def _move_last_kernel(
    rows,
    slots,
    lengths,
    block_tables,
    pages,
    kept,
    num_blocks,
    WIDTHS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Move what lies in one head's last slot, with all its data, to where the evicted entry lies; count what stays."""
    pair = tl.program_id(0).to(tl.int64)
    cell = tl.load(rows + pair // KV_HEADS) * KV_HEADS + pair % KV_HEADS
    hole, last = tl.load(slots + pair), tl.load(lengths + cell) - 1
    moves = (hole >= 0) & (hole != last)
    source = places(block_tables + cell * num_blocks, tl.maximum(last, 0), moves, BLOCK_SIZE)
    target = places(block_tables + cell * num_blocks, tl.maximum(hole, 0), moves, BLOCK_SIZE)
    channel = tl.arange(0, CHANNELS)
    for field in tl.static_range(len(pages)):
        moved = moves & (channel < WIDTHS[field])
        states = tl.load(pages[field] + source * WIDTHS[field] + channel, mask=moved)
        tl.store(pages[field] + target * WIDTHS[field] + channel, states, mask=moved)
    tl.store(kept + pair, tl.where(hole >= 0, last, last + 1))


@triton.jit
def _shrink_kernel(
    rows,
    kept,
    lengths,
    block_tables,
    free_blocks,
    num_free,
    num_pairs,
    num_blocks,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Shorten heads to what they kept, and push the blocks that become free onto the free stack, in order."""
    height = tl.load(num_free)
    for start in range(0, num_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        exists = pair < num_pairs
        cell = tl.load(rows + pair // KV_HEADS, mask=exists, other=0) * KV_HEADS + pair % KV_HEADS
        length = tl.load(kept + pair, mask=exists, other=0)
        first = tl.cdiv(length, BLOCK_SIZE)
        count = tl.cdiv(tl.load(lengths + cell, mask=exists, other=0), BLOCK_SIZE) - first
        place = height + tl.cumsum(count, 0) - count
        for index in range(0, tl.max(count, 0)):
            block = tl.load(block_tables + cell * num_blocks + first + index, mask=index < count, other=0)
            tl.store(free_blocks + place + index, block, mask=index < count)
        tl.store(lengths + cell, length, mask=exists)
        height += tl.sum(count, 0)
    tl.store(num_free, height)
