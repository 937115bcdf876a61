"""What eviction asks after a generated token: entries' metadata and attention, and which one goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.triton.tile import places

TILE = 1024
"""Slots, or heads, that a program handles at once."""


def write_metadata(cache: LayerCache, batch: ForwardBatch, metadata: dict[str, Tensor]) -> None:
    """See `dmc.kernels.reference.write_metadata`."""
    num_numbers = batch.num_tokens * cache.lengths.shape[1]
    with torch.cuda.device_of(cache.lengths):
        _write_kernel[(triton.cdiv(num_numbers, TILE),)](
            batch.row_index,
            batch.sequence,
            batch.cu_seqlens,
            cache.lengths,
            cache.block_tables,
            tuple(_as_integers(cache.entry_metadata[name]) for name in metadata),
            tuple(_as_integers(numbers.contiguous()) for numbers in metadata.values()),
            num_numbers,
            cache.block_tables.shape[-1],
            NUMBERS=TILE,
            **_constants(cache),
        )


def read_metadata(cache: LayerCache, rows: Tensor, names: Sequence[str], num_slots: int) -> list[Tensor]:
    """See `dmc.kernels.reference.read_metadata`."""
    pages = [cache.entry_metadata[name] for name in names]
    read = [page.new_empty(len(rows), cache.lengths.shape[1], num_slots) for page in pages]
    with torch.cuda.device_of(cache.lengths):
        _read_kernel[(read[0][..., 0].numel(), triton.cdiv(num_slots, TILE))](
            rows,
            cache.lengths,
            cache.block_tables,
            tuple(map(_as_integers, pages)),
            tuple(map(_as_integers, read)),
            num_slots,
            cache.block_tables.shape[-1],
            FILLS=tuple(0 if page.is_floating_point() else -1 for page in pages),
            SLOTS=TILE,
            **_constants(cache),
        )
    return read


def add_attention(cache: LayerCache, rows: Tensor, scores: Tensor, powers: dict[str, int], num_slots: int) -> Tensor:
    """See `dmc.kernels.reference.add_attention`."""
    kv_heads = cache.lengths.shape[1]
    group = scores.shape[1] // kv_heads
    attention = scores.new_empty(len(rows), kv_heads, num_slots)
    with torch.cuda.device_of(scores):
        _add_kernel[(len(rows) * kv_heads, triton.cdiv(num_slots, TILE))](
            rows,
            cache.lengths,
            cache.block_tables,
            scores.contiguous(),
            attention,
            tuple(cache.entry_metadata[name] for name in powers),
            scores.shape[-1],
            num_slots,
            cache.block_tables.shape[-1],
            POWERS=tuple(powers.values()),
            GROUP=group,
            SLOTS=TILE,
            **_constants(cache),
        )
    return attention


def nth_newest(positions: Tensor, counts: Tensor) -> Tensor:
    """See `dmc.kernels.reference.nth_newest`."""
    found = positions.new_empty(counts.shape)
    with torch.cuda.device_of(positions):
        _nth_kernel[(counts.numel(),)](
            positions.contiguous(), counts.contiguous(), found, positions.shape[-1], SLOTS=TILE
        )
    return found


def eviction_candidate(scores: Tensor, positions: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
    """See `dmc.kernels.reference.eviction_candidate`."""
    slots = torch.empty_like(lengths, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(scores):
        _candidate_kernel[(slots.numel(),)](
            scores,
            positions.contiguous(),
            lengths.contiguous(),
            limits.contiguous(),
            slots,
            positions.shape[-1],
            *scores.stride(),
            KV_HEADS=lengths.shape[1],
            SLOTS=TILE,
        )
    return slots


def _constants(cache: LayerCache) -> dict[str, int]:
    return {"KV_HEADS": cache.lengths.shape[1], "BLOCK_SIZE": cache.block_size}


def _as_integers(numbers: Tensor) -> Tensor:
    """View metadata, 4 bytes each, as integers, so that one kernel moves all of them."""
    return numbers.view(torch.int32)


@triton.jit
def _write_kernel(
    rows,
    sequences,
    cu_seqlens,
    lengths,
    block_tables,
    metadata,
    given,
    num_numbers,
    num_blocks,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Write the numbers of new tokens into the slots that were appended for them."""
    index = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    exists = index < num_numbers
    token = index // KV_HEADS
    sequence = tl.load(sequences + token, mask=exists, other=0)
    cell = tl.load(rows + sequence, mask=exists, other=0) * KV_HEADS + index % KV_HEADS
    behind = tl.load(cu_seqlens + sequence + 1, mask=exists, other=0) - token  # at least 1: the newest is in the last
    slot = tl.load(lengths + cell, mask=exists, other=0) - behind
    place = places(block_tables + cell * num_blocks, slot, exists, BLOCK_SIZE)
    for field in tl.static_range(len(metadata)):
        tl.store(metadata[field] + place, tl.load(given[field] + index, mask=exists), mask=exists)


@triton.jit
def _read_kernel(
    rows,
    lengths,
    block_tables,
    metadata,
    read,
    num_slots,
    num_blocks,
    FILLS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Copy one head's metadata, slot by slot."""
    pair = tl.program_id(0).to(tl.int64)
    cell = tl.load(rows + pair // KV_HEADS) * KV_HEADS + pair % KV_HEADS
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    held = slot < tl.minimum(tl.load(lengths + cell), num_slots)
    place = places(block_tables + cell * num_blocks, slot, held, BLOCK_SIZE)
    for field in tl.static_range(len(metadata)):
        numbers = tl.load(metadata[field] + place, mask=held, other=FILLS[field])
        tl.store(read[field] + pair * num_slots + slot, numbers, mask=slot < num_slots)


@triton.jit
def _add_kernel(
    rows,
    lengths,
    block_tables,
    scores,
    attention,
    sums,
    num_scores,
    num_slots,
    num_blocks,
    POWERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Average one KV head's scores over its group, and add their powers to the sums."""
    pair = tl.program_id(0).to(tl.int64)
    cell = tl.load(rows + pair // KV_HEADS) * KV_HEADS + pair % KV_HEADS
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    held = slot < tl.minimum(tl.load(lengths + cell), num_slots)
    mean = tl.zeros((SLOTS,), tl.float32)
    for member in range(GROUP):
        mean += tl.load(scores + (pair * GROUP + member) * num_scores + slot, mask=held, other=0.0)
    mean /= GROUP
    tl.store(attention + pair * num_slots + slot, mean, mask=slot < num_slots)
    place = places(block_tables + cell * num_blocks, slot, held, BLOCK_SIZE)
    for field in tl.static_range(len(sums)):
        more = mean if POWERS[field] == 1 else mean * mean
        tl.store(sums[field] + place, tl.load(sums[field] + place, mask=held, other=0.0) + more, mask=held)


@triton.jit
def _nth_kernel(positions, counts, found, num_slots, SLOTS: tl.constexpr):
    """Find one head's position by bisection: a pass over its entries counts those from the middle on."""
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + head)
    head_positions = positions + head * num_slots
    newest = tl.full((), -1, tl.int32)
    for start in range(0, num_slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        newest = tl.maximum(newest, tl.max(tl.load(head_positions + slot, mask=slot < num_slots, other=-1), 0))
    low = tl.zeros((), tl.int32)  # as many as are asked for lie from here on, or all
    high = tl.maximum(newest, 0) + 1  # fewer from here on
    while high - low > 1:
        middle = low + (high - low) // 2
        above = tl.zeros((), tl.int32)
        for start in range(0, num_slots, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            position = tl.load(head_positions + slot, mask=slot < num_slots, other=-1)
            above += tl.sum((position >= middle).to(tl.int32), 0)
        low = tl.where(above >= count, middle, low)
        high = tl.where(above >= count, high, middle)
    tl.store(found + head, tl.where(count <= 0, 2147483647, low))


@triton.jit
def _candidate_kernel(
    scores,
    positions,
    lengths,
    limits,
    slots,
    num_slots,
    sequence_stride,
    head_stride,
    slot_stride,
    KV_HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Find one head's entry with the lowest score, the youngest of equal ones."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    length = tl.load(lengths + pair)
    head_scores = scores + sequence * sequence_stride + head * head_stride
    lowest = tl.full((), float("inf"), tl.float32)
    youngest = tl.full((), -1, tl.int32)
    candidate = tl.zeros((), tl.int32)
    for start in range(0, num_slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        held = slot < length
        score = tl.load(head_scores + slot * slot_stride, mask=held, other=float("inf"))
        position = tl.load(positions + pair * num_slots + slot, mask=held, other=-1)
        least = tl.min(score, 0)
        position = tl.where(score == least, position, -1)
        latest = tl.max(position, 0)
        is_next = (least < lowest) | ((least == lowest) & (latest > youngest))
        place = tl.max(tl.where((position == latest) & held, slot, 0), 0)
        lowest = tl.where(is_next, least, lowest)
        youngest = tl.where(is_next, latest, youngest)
        candidate = tl.where(is_next, place, candidate)
    tl.store(slots + pair, tl.where(length > tl.load(limits + sequence), candidate, -1).to(tl.int64))
