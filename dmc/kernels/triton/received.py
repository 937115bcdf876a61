"""Attention that slots receive from all queries of a pass: sums down the columns, by the forward's log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.triton.tile import LOG2_E, load_rows, places


def attention_received(
    query: Tensor, cache: LayerCache, batch: ForwardBatch, slots: Tensor, scaling: float, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """See `dmc.kernels.probabilities.attention_received`; as wide as the longest sequence, without a host sync."""
    query_heads, head_dim = query.shape[1:]
    kv_heads, num_blocks = cache.block_tables.shape[1:]
    sequences, group = len(batch.rows), query_heads // kv_heads
    width = min(max(batch.ends), num_blocks * cache.block_size)
    query = query if query.stride(-1) == 1 else query.contiguous()
    columns, squares = lse.new_empty(sequences, kv_heads, group, width), lse.new_empty(sequences, kv_heads, width)
    is_wide, channels = query.element_size() == 4, max(16, triton.next_power_of_2(head_dim))
    keys = 16 if is_wide else 32 if channels > 128 else 64
    with torch.cuda.device_of(query):
        _receive_kernel[(sequences * kv_heads, triton.cdiv(width, keys))](
            query,
            cache.key_pages,
            cache.key_scales,
            cache.block_tables,
            slots.contiguous(),
            batch.row_index,
            batch.cu_seqlens,
            lse.contiguous(),
            columns,
            squares,
            width,
            *query.stride()[:2],
            num_blocks,
            scaling * LOG2_E.value,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=cache.block_size,
            CHANNELS=channels,
            KEYS=keys,
            MEMBERS=triton.next_power_of_2(group),
            QUERIES=16 if is_wide or channels > 128 else 64,
            num_warps=8 if is_wide and channels > 64 else 4,
        )
    return columns, squares


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
            scores = tl.dot(member_query, tl.trans(key.to(member_query.dtype)), input_precision="ieee") * scaling
            if key_scales is not None:
                scores *= tl.load(key_scales + place, mask=held, other=0.0)[None, :]
            weight = tl.where(visible, tl.exp2(scores - LOG2_E * member_lse[:, None]), 0.0)
            by_member += tl.where(member[:, None] == m, tl.sum(weight, 0)[None, :], 0.0)
            mean += weight
        mean /= GROUP
        of_mean += tl.sum(mean * mean, 0)
    known = slot < width
    tl.store(squares + pair * width + slot, of_mean, mask=known)
    target = (pair * GROUP + member)[:, None] * width + slot[None, :]
    tl.store(columns + target, by_member, mask=(member < GROUP)[:, None] & known[None, :])
