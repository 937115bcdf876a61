"""Prefill attention: a block of queries of one head over the slots that any of them sees, and what is beside pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import Seen
from dmc.kernels.triton.tile import LOG2_E, attend_own, attend_tile, load_rows, load_slots, tile_keys

QUERY_BYTES = 16384
"""Size of a block of queries, at most 64 of them."""


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    seen: Seen,
    scaling: float,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """See `dmc.kernels.reference.prefill_attention`."""
    assert key_pages.is_contiguous() and value_pages.is_contiguous()
    sequences, query_heads, num_new, head_dim = query.shape
    kv_heads, num_blocks = block_tables.shape[1:]
    query = query if query.stride(-1) == 1 else query.contiguous()
    top, recent = seen.top, seen.recent
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    channels = max(16, triton.next_power_of_2(head_dim))
    queries = max(16, min(64, QUERY_BYTES // (channels * query.element_size())))
    with torch.cuda.device_of(query):
        _prefill_kernel[(sequences * query_heads, triton.cdiv(num_new, queries))](
            query,
            key_pages,
            value_pages,
            block_tables.contiguous(),
            seen.slots.contiguous(),
            rows,
            None if top is None else top.key.contiguous(),
            None if top is None else top.value.contiguous(),
            None if top is None else top.exists.contiguous(),
            None if recent is None else recent.key.contiguous(),
            None if recent is None else recent.value.contiguous(),
            None if recent is None else recent.exists.contiguous(),
            out,
            *query.stride()[:3],
            num_new,
            num_blocks,
            0 if recent is None else recent.key.shape[2] - num_new + 1,
            scaling * LOG2_E,
            KV_HEADS=kv_heads,
            GROUP=query_heads // kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=key_pages.shape[1],
            QUERIES=queries,
            CHANNELS=channels,
            KEYS=min(64, tile_keys(channels, key_pages.element_size())),
        )
    return out


@triton.jit
def _prefill_kernel(
    query,
    key_pages,
    value_pages,
    block_tables,
    slots,
    rows,
    top_key,
    top_value,
    top_exists,
    recent_key,
    recent_value,
    recent_exists,
    out,
    query_stride,
    query_head_stride,
    query_time_stride,
    num_new,
    num_blocks,
    delay,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend from one block of queries of one query head."""
    query_head = tl.program_id(0).to(tl.int64)
    pair = query_head // GROUP
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    row = sequence if rows is None else tl.load(rows + sequence)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES  # the last queries see most: they start first
    index, channel = first + tl.arange(0, QUERIES), tl.arange(0, CHANNELS)
    asks = index < num_new
    query_place = (
        sequence * query_stride + (query_head % (KV_HEADS * GROUP)) * query_head_stride + index * query_time_stride
    )
    queries = load_rows(query, query_place, asks, channel, HEAD_DIM)
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, CHANNELS), tl.float32)

    seen = tl.load(slots + pair * num_new + index, mask=asks, other=0).to(tl.int32)
    most = tl.max(seen, 0)
    table = block_tables + (row * KV_HEADS + head) * num_blocks
    for start in range(0, most, KEYS):
        slot = start + tl.arange(0, KEYS)
        held = slot < most
        key = load_slots(key_pages, table, slot, held, channel, HEAD_DIM, BLOCK_SIZE)
        value = load_slots(value_pages, table, slot, held, channel, HEAD_DIM, BLOCK_SIZE)
        visible = slot[None, :] < seen[:, None]
        _, peak, total, acc = attend_tile(queries, key, value, visible, scaling, peak, total, acc)
    if top_key is not None:
        exists = tl.load(top_exists + sequence * num_new + index, mask=asks, other=0) != 0
        place = (pair * num_new + index) * HEAD_DIM
        key = load_rows(top_key, place, exists, channel, HEAD_DIM)
        value = load_rows(top_value, place, exists, channel, HEAD_DIM)
        peak, total, acc = attend_own(queries, key, value, exists, scaling, peak, total, acc)
    if recent_key is not None:
        num_recent = num_new + delay - 1
        for start in range(first, tl.minimum(first + QUERIES + delay - 1, num_recent), KEYS):
            other = start + tl.arange(0, KEYS)
            exists = tl.load(recent_exists + sequence * num_recent + other, mask=other < num_recent, other=0) != 0
            place = (pair * num_recent + other) * HEAD_DIM
            key = load_rows(recent_key, place, exists, channel, HEAD_DIM)
            value = load_rows(recent_value, place, exists, channel, HEAD_DIM)
            in_band = (other[None, :] >= index[:, None]) & (other[None, :] < index[:, None] + delay)
            visible = in_band & exists[None, :]
            _, peak, total, acc = attend_tile(queries, key, value, visible, scaling, peak, total, acc)

    acc /= tl.where(total > 0, total, 1.0)[:, None]
    place = (query_head * num_new + index) * HEAD_DIM
    written = asks[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(out + place[:, None] + channel[None, :], acc.to(out.dtype.element_ty), mask=written)
