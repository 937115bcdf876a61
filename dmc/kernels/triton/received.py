"""Attention that slots receive from all queries of a pass: each query's log-sum-exp, then sums down the columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.triton.tile import LOG2_E, load_rows, places


def attention_received(
    query: Tensor, cache: LayerCache, batch: ForwardBatch, slots: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `dmc.kernels.probabilities.attention_received`; as wide as the longest sequence, without a host sync."""
    query_heads, head_dim = query.shape[1:]
    kv_heads, num_blocks = cache.block_tables.shape[1:]
    sequences, group = len(batch.rows), query_heads // kv_heads
    width = min(max(batch.ends), num_blocks * cache.block_size)
    query = query if query.stride(-1) == 1 else query.contiguous()
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    columns = lse.new_empty(sequences, kv_heads, group, width)
    squares = lse.new_empty(sequences, kv_heads, width)
    is_wide, channels = query.element_size() == 4, max(16, triton.next_power_of_2(head_dim))
    members, size = triton.next_power_of_2(group), 16 if is_wide or channels > 128 else 64
    rows = max(size, members)
    where = batch.row_index, batch.cu_seqlens
    given = query, cache.key_pages, cache.key_scales, cache.block_tables, slots.contiguous(), *where, lse
    numbers = *query.stride()[:2], num_blocks, scaling * LOG2_E
    constants = {"KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": cache.block_size}
    constants |= {"CHANNELS": channels, "KEYS": 16 if is_wide else 32 if channels > 128 else 64}
    tiles, num_warps = batch.tiles(rows // group), 8 if is_wide and channels > 64 else 4
    with torch.cuda.device_of(query):
        _lse_kernel[(kv_heads, len(tiles))](tiles, *given, *numbers, ROWS=rows, num_warps=num_warps, **constants)
        _receive_kernel[(sequences * kv_heads, triton.cdiv(width, constants["KEYS"]))](
            *given, columns, squares, width, *numbers, MEMBERS=members, QUERIES=size, num_warps=num_warps, **constants
        )
    return columns, squares


@triton.jit
def _scores(query, key, key_scales, place, held, scaling):
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scaling
    if key_scales is not None:
        scores *= tl.load(key_scales + place, mask=held, other=0.0)[None, :]
    return scores


@triton.jit
def _lse_kernel(
    tiles,
    query,
    key_pages,
    key_scales,
    block_tables,
    slots,
    cache_rows,
    cu_seqlens,
    lse,
    query_stride,
    query_head_stride,
    num_blocks,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the base-2 log-sum-exp of a block of queries of one KV head; row r is query r // GROUP."""
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
    seen = tl.load(slots + token * KV_HEADS + head, mask=asks, other=0).to(tl.int32)
    most = tl.max(seen, 0)
    table = block_tables + (tl.load(cache_rows + sequence) * KV_HEADS + head) * num_blocks
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for begin in tl.range(0, most, KEYS, num_stages=3):
        slot = begin + tl.arange(0, KEYS)
        held = slot < most
        place = places(table, slot, held, BLOCK_SIZE)
        key = load_rows(key_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
        scores = _scores(packed, key, key_scales, place, held, scaling)
        scores = tl.where(slot[None, :] < seen[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        peak = new_peak
    tl.store(lse + token * (KV_HEADS * GROUP) + query_head, peak + tl.log2(total), mask=asks)


@triton.jit
def _receive_kernel(
    query,
    key_pages,
    key_scales,
    block_tables,
    slots,
    cache_rows,
    cu_seqlens,
    lse,
    columns,
    squares,
    width,
    query_stride,
    query_head_stride,
    num_blocks,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    MEMBERS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Sum what a tile of one KV head's slots receives: by query head, and the square of the group's mean."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    num_new = (end - start).to(tl.int32)
    begin = tl.program_id(1) * KEYS
    slot, channel, member = begin + tl.arange(0, KEYS), tl.arange(0, CHANNELS), tl.arange(0, MEMBERS)
    least = tl.load(slots + start * KV_HEADS + head).to(tl.int32)
    held = slot < tl.load(slots + (end - 1) * KV_HEADS + head).to(tl.int32)
    table = block_tables + (tl.load(cache_rows + sequence) * KV_HEADS + head) * num_blocks
    place = places(table, slot, held, BLOCK_SIZE)
    key = load_rows(key_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
    by_member = tl.zeros((MEMBERS, KEYS), tl.float32)
    of_mean = tl.zeros((KEYS,), tl.float32)
    first = tl.maximum(begin + 1 - least, 0)  # a token adds one slot at most: those before see none of these
    last = tl.where(begin < tl.load(slots + (end - 1) * KV_HEADS + head).to(tl.int32), num_new, 0)
    for block in range(first, last, QUERIES):
        index = block + tl.arange(0, QUERIES)
        asks, token = index < num_new, start + index
        seen = tl.load(slots + token * KV_HEADS + head, mask=asks, other=0).to(tl.int32)
        visible = slot[None, :] < seen[:, None]
        mean = tl.zeros((QUERIES, KEYS), tl.float32)
        for m in range(GROUP):
            query_head = head * GROUP + m
            member_query = load_rows(
                query, token * query_stride + query_head * query_head_stride, asks, channel, HEAD_DIM
            )
            member_lse = tl.load(lse + token * (KV_HEADS * GROUP) + query_head, mask=asks, other=0.0)
            weight = tl.exp2(_scores(member_query, key, key_scales, place, held, scaling) - member_lse[:, None])
            weight = tl.where(visible, weight, 0.0)
            by_member += tl.where(member[:, None] == m, tl.sum(weight, 0)[None, :], 0.0)
            mean += weight
        mean /= GROUP
        of_mean += tl.sum(mean * mean, 0)
    known = slot < width
    tl.store(squares + pair * width + slot, of_mean, mask=known)
    target = (pair * GROUP + member)[:, None] * width + slot[None, :]
    tl.store(columns + target, by_member, mask=(member < GROUP)[:, None] & known[None, :])
