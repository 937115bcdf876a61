"""Prefill attention: a block of queries of one KV head, its query heads packed together so that keys are read once.

It iterates over the slots that any of them sees, then over the keys outside the pages. Blocks come off a flat list, so
that no program is empty however different the sequences' numbers of tokens are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import HOPPER, VisibleKeys, major_capability
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.triton.tile import (
    LOG2_E,
    STAGES,
    attend_own,
    attend_tile,
    load_rows,
    places,
    start_from_sinks,
    tile_keys,
)

QUERY_BYTES = 16384
"""Size of a block of query rows, at most 64 of them; in float32 half as much."""
TILE_BYTES = 8192
"""Size of a tile's keys, at most 32 of them; in float32 half as many."""


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    batch: ForwardBatch,
    seen: VisibleKeys,
    scaling: float,
    scales: tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dmc.kernels.reference.prefill_attention`."""
    assert key_pages.is_contiguous() and value_pages.is_contiguous()
    query_heads, head_dim = query.shape[1:]
    kv_heads, num_blocks = block_tables.shape[1:]
    group, sequences = query_heads // kv_heads, len(batch.rows)
    query = query if query.stride(-1) == 1 else query.contiguous()
    open_slot, recent = seen.open_slot, seen.recent
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    channels = max(16, triton.next_power_of_2(head_dim))
    row_bytes = channels * query.element_size()
    is_wide = query.element_size() == 4
    # products of float32 take their operands, and those of 8 bits in it their copies, from registers
    most = 64 if not is_wide else 32 if scales is None else 16
    rows = max(16, triton.next_power_of_2(group), min(most, QUERY_BYTES // (1 + is_wide) // row_bytes))
    # there tiles of 64 keys leave room for two programs on a multiprocessor, without a spill
    is_large = not is_wide and scales is None and channels <= 128 and major_capability(query.device) == HOPPER
    tiles = batch.tiles(rows // group)
    with torch.cuda.device_of(query):
        _prefill_kernel[(kv_heads, len(tiles))](
            tiles,
            query,
            key_pages,
            value_pages,
            *(scales or (None, None)),
            bias,
            block_tables.contiguous(),
            seen.slots.contiguous(),
            batch.row_index,
            batch.cu_seqlens,
            None if open_slot is None else open_slot.key.contiguous(),
            None if open_slot is None else open_slot.value.contiguous(),
            None if open_slot is None else open_slot.exists.contiguous(),
            None if recent is None else recent.key.contiguous(),
            None if recent is None else recent.value.contiguous(),
            None if recent is None else recent.exists.contiguous(),
            sinks,
            out,
            lse,
            *query.stride()[:2],
            num_blocks,
            0 if recent is None else (len(recent.exists) - batch.num_tokens) // sequences + 1,
            scaling * LOG2_E.value,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=key_pages.shape[1],
            ROWS=rows,
            CHANNELS=channels,
            KEYS=64 if is_large else min(16 if is_wide else 32, tile_keys(row_bytes, TILE_BYTES)),
            STAGES=STAGES,
            num_warps=4 if is_large or channels <= 64 else 8,
        )
    return out if lse is None else (out, lse)


@triton.jit
def _prefill_kernel(
    tiles,
    query,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    bias,
    block_tables,
    slots,
    cache_rows,
    cu_seqlens,
    top_key,
    top_value,
    top_exists,
    recent_key,
    recent_value,
    recent_exists,
    sinks,
    out,
    lse,
    query_stride,
    query_head_stride,
    num_blocks,
    delay,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from one block of queries of one KV head; row r is query r // GROUP of member r % GROUP."""
    head, tile = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(tiles + 2 * tile + 1)
    start = tl.load(cu_seqlens + sequence)
    num_new = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    queries: tl.constexpr = ROWS // GROUP
    row, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    index = first + row // GROUP
    asks = (index < num_new) & (row < queries * GROUP)
    query_head, token = head * GROUP + row % GROUP, start + index
    packed = load_rows(query, token * query_stride + query_head * query_head_stride, asks, channel, HEAD_DIM)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    if sinks is not None:
        peak, total = start_from_sinks(sinks, query_head, asks)

    seen = tl.load(slots + token * KV_HEADS + head, mask=asks, other=0).to(tl.int32)
    most = tl.max(seen, 0)
    table = block_tables + (tl.load(cache_rows + sequence) * KV_HEADS + head) * num_blocks
    for begin in tl.range(0, most, KEYS, num_stages=STAGES):
        slot = begin + tl.arange(0, KEYS)
        held = slot < most
        place = places(table, slot, held, BLOCK_SIZE)
        key = load_rows(key_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
        value = load_rows(value_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
        visible = slot[None, :] < seen[:, None]
        _, peak, total, acc = attend_tile(
            packed, key, value, visible, scaling, peak, total, acc, key_scales, value_scales, bias, place, held
        )
    if top_key is not None:
        has_top = tl.load(top_exists + token, mask=asks, other=0) != 0
        top_place = (token * KV_HEADS + head) * HEAD_DIM
        state_key = load_rows(top_key, top_place, has_top, channel, HEAD_DIM)
        state_value = load_rows(top_value, top_place, has_top, channel, HEAD_DIM)
        peak, total, acc = attend_own(packed, state_key, state_value, has_top, scaling, peak, total, acc)
    if recent_key is not None:
        num_recent = num_new + delay - 1
        recent_start = start + sequence * (delay - 1)
        for begin in tl.range(first, tl.minimum(first + queries + delay - 1, num_recent), KEYS, num_stages=1):
            other = begin + tl.arange(0, KEYS)
            exists = tl.load(recent_exists + recent_start + other, mask=other < num_recent, other=0) != 0
            place = ((recent_start + other) * KV_HEADS + head) * HEAD_DIM
            key = load_rows(recent_key, place, exists, channel, HEAD_DIM)
            value = load_rows(recent_value, place, exists, channel, HEAD_DIM)
            in_band = (other[None, :] >= index[:, None]) & (other[None, :] < index[:, None] + delay)
            visible = in_band & exists[None, :]
            _, peak, total, acc = attend_tile(
                packed, key, value, visible, scaling, peak, total, acc, None, None, None, place, exists
            )

    acc /= tl.where(total > 0, total, 1.0)[:, None]
    place = token * (KV_HEADS * GROUP) + query_head
    if lse is not None:
        tl.store(lse + place, peak / LOG2_E + tl.log(total), mask=asks)
    written_to = place * HEAD_DIM
    written = asks[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(out + written_to[:, None] + channel[None, :], acc.to(out.dtype.element_ty), mask=written)
