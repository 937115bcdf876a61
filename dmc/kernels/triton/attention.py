"""Decode attention: every head's slots in equal pieces, one program each, then a reduction over the pieces."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import Recent
from dmc.kernels.triton.tile import LOG2_E, attend_tile, load_rows, places, tile_keys

SHORTEST_SPLIT = 128
"""Slots below which a head is not split further."""
MOST_SPLITS = 64
SLOTS_NORMALIZED = 1024
"""Scores that one program turns into probabilities."""


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scaling: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    rows: Tensor | None = None,
    recent: Recent | None = None,
    return_scores: bool = False,
    num_scores: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dmc.kernels.reference.paged_attention`.

    There is no host sync: the number of splits follows from the tables' capacity, and each head cuts its own length
    into that many pieces.
    """
    assert key_pages.is_contiguous() and value_pages.is_contiguous()
    batch, query_heads, head_dim = query.shape
    kv_heads, num_blocks = block_tables.shape[1:]
    block_size = key_pages.shape[1]
    group, num_recent = query_heads // kv_heads, 0 if recent is None else len(recent.exists) // batch
    num_splits = split_count(batch * kv_heads, num_blocks * block_size, query.device)
    num_parts = num_splits + (num_recent > 0)
    lengths = lengths.contiguous()
    query = query if query.stride(-1) == 1 else query.contiguous()
    partial = query.new_empty(batch * kv_heads, num_parts, group, head_dim, dtype=torch.float32)
    partial_lse = partial.new_empty(partial.shape[:3])
    num_scores = num_scores or num_blocks * block_size
    scores = partial.new_empty(batch, query_heads, num_scores) if return_scores else None
    lse = partial.new_empty(batch, query_heads) if return_scores else None
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    channels = max(16, triton.next_power_of_2(head_dim))
    with torch.cuda.device_of(query):
        _split_kernel[(batch * kv_heads, num_parts)](
            query,
            key_pages,
            value_pages,
            *(scales or (None, None)),
            block_tables.contiguous(),
            lengths,
            rows,
            None if recent is None else recent.key.contiguous(),
            None if recent is None else recent.value.contiguous(),
            None if recent is None else recent.exists.contiguous(),
            partial,
            partial_lse,
            scores,
            query.stride(0),
            query.stride(1),
            num_blocks,
            num_recent,
            num_scores,
            scaling * LOG2_E,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            NUM_SPLITS=num_splits,
            SHORTEST=SHORTEST_SPLIT,
            MEMBERS=max(16, triton.next_power_of_2(group)),
            CHANNELS=channels,
            KEYS=tile_keys(channels, query.element_size(), scales is not None),
        )
        _reduce_kernel[(batch * query_heads,)](
            partial,
            partial_lse,
            out,
            lse,
            NUM_PARTS=num_parts,
            GROUP=group,
            HEAD_DIM=head_dim,
            PARTS=triton.next_power_of_2(num_parts),
            CHANNELS=channels,
        )
        if scores is None:
            return out
        _normalize_kernel[(batch * query_heads, triton.cdiv(scores.shape[-1], SLOTS_NORMALIZED))](
            scores, lse, lengths, rows, scores.shape[-1], KV_HEADS=kv_heads, GROUP=group, SLOTS=SLOTS_NORMALIZED
        )
        return out, scores


def split_count(heads: int, capacity: int, device: torch.device) -> int:
    """Return the pieces per head that fill the device, a power of two, from shapes alone (for CUDA graphs)."""
    wanted = triton.cdiv(2 * _multiprocessors(device), heads)
    return triton.next_power_of_2(max(1, min(wanted, triton.cdiv(capacity, SHORTEST_SPLIT), MOST_SPLITS)))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _split_kernel(
    query,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    block_tables,
    lengths,
    rows,
    recent_key,
    recent_value,
    recent_exists,
    partial,
    partial_lse,
    scores,
    query_stride,
    query_head_stride,
    num_blocks,
    num_recent,
    num_scores,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend from the query heads of one KV head to one piece of its slots; the last part is the recent tokens."""
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    row = sequence if rows is None else tl.load(rows + sequence)
    cell = row * KV_HEADS + head
    member, channel = tl.arange(0, MEMBERS), tl.arange(0, CHANNELS)
    in_group = member < GROUP
    query_place = sequence * query_stride + (head * GROUP + member) * query_head_stride
    queries = load_rows(query, query_place, in_group, channel, HEAD_DIM)
    peak = tl.full((MEMBERS,), float("-inf"), tl.float32)
    total = tl.zeros((MEMBERS,), tl.float32)
    acc = tl.zeros((MEMBERS, CHANNELS), tl.float32)

    length = tl.load(lengths + cell)
    piece = tl.cdiv(tl.maximum(tl.cdiv(length, NUM_SPLITS), SHORTEST), KEYS) * KEYS
    table = block_tables + cell * num_blocks
    for start in range(split * piece, tl.minimum(split * piece + piece, length), KEYS):
        slot = start + tl.arange(0, KEYS)
        held = slot < length
        place = places(table, slot, held, BLOCK_SIZE)
        key = load_rows(key_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
        value = load_rows(value_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
        score, peak, total, acc = attend_tile(
            queries, key, value, held[None, :], scaling, peak, total, acc, key_scales, value_scales, place, held
        )
        if scores is not None:
            row_of = (pair * GROUP + member) * num_scores
            tl.store(scores + row_of[:, None] + slot[None, :], score, mask=in_group[:, None] & held[None, :])
    if recent_key is not None:
        for start in range(0, tl.where(split == NUM_SPLITS, num_recent, 0), KEYS):
            index = start + tl.arange(0, KEYS)
            held = index < num_recent
            exists = tl.load(recent_exists + sequence * num_recent + index, mask=held, other=0) != 0
            place = ((sequence * num_recent + index) * KV_HEADS + head) * HEAD_DIM
            key = load_rows(recent_key, place, exists, channel, HEAD_DIM)
            value = load_rows(recent_value, place, exists, channel, HEAD_DIM)
            score, peak, total, acc = attend_tile(
                queries, key, value, exists[None, :], scaling, peak, total, acc, None, None, place, exists
            )

    some = total > 0
    place = (pair * tl.num_programs(1) + split) * GROUP + member
    lse = tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(partial_lse + place, lse, mask=in_group)
    acc /= tl.where(some, total, 1.0)[:, None]
    written = (in_group & some)[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(partial + place[:, None] * HEAD_DIM + channel[None, :], acc, mask=written)


@triton.jit
def _reduce_kernel(
    partial,
    partial_lse,
    out,
    lse,
    NUM_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Average one query head's parts by their shares of the softmax; a head that saw nothing gets zeros."""
    query_head = tl.program_id(0).to(tl.int64)
    part, channel = tl.arange(0, PARTS), tl.arange(0, CHANNELS)
    place = ((query_head // GROUP) * NUM_PARTS + part) * GROUP + query_head % GROUP
    part_lse = tl.load(partial_lse + place, mask=part < NUM_PARTS, other=float("-inf"))
    peak = tl.max(part_lse, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(part_lse - peak)
    total = tl.sum(weight, 0)
    total = tl.where(total > 0, total, 1.0)
    states = load_rows(partial, place * HEAD_DIM, weight > 0, channel, HEAD_DIM)
    result = tl.sum(states * weight[:, None], 0) / total
    tl.store(out + query_head * HEAD_DIM + channel, result.to(out.dtype.element_ty), mask=channel < HEAD_DIM)
    if lse is not None:
        tl.store(lse + query_head, peak + tl.log2(total))


@triton.jit
def _normalize_kernel(
    scores, lse, lengths, rows, capacity, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr
):
    """Turn one query head's scores into probabilities, 0 beyond its length."""
    query_head = tl.program_id(0).to(tl.int64)
    sequence, head = query_head // (KV_HEADS * GROUP), query_head // GROUP % KV_HEADS
    row = sequence if rows is None else tl.load(rows + sequence)
    length = tl.load(lengths + row * KV_HEADS + head)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    place = scores + query_head * capacity + slot
    score = tl.load(place, mask=slot < length, other=float("-inf"))
    tl.store(place, tl.exp2(score - tl.load(lse + query_head)), mask=slot < capacity)
