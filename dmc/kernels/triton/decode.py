"""Decode attention: the chunks of all heads in one queue, of which every program takes an equal run.

A program finds its run by a search in the prefix sum of the heads' chunks, which the append of the same tokens leaves
on the device: heads of very different lengths share the work evenly, and the number of programs follows from shapes
alone (for CUDA graphs). A head that lies within one run is written at once; the others are cut where runs end, and
their parts are merged afterwards.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.kernels.base import Recent
from dmc.kernels.triton.tile import (
    LOG2_E,
    STAGES,
    attend_tile,
    load_rows,
    places,
    start_from_sinks,
    tile_keys,
    tile_warps,
)

CHUNK = 128
"""Slots of a chunk, a multiple of every tile; heads are cut between chunks."""


class Tuning(NamedTuple):
    """What a chip is fastest with, by the sweep of `dmc gpu-check`."""

    programs: int = 2
    """Programs for each multiprocessor, resident at once, or one after the other where each takes all of one."""
    stages: int = STAGES
    """See `STAGES`."""
    tile_bytes: int = 8192
    """Size of a tile's keys."""


TUNINGS: dict[tuple[int, int], Tuning] = {(9, 0): Tuning()}
"""By compute capability, where a sweep has measured a chip: an H100 is within 3 % as fast with 3 programs, and slower
with all others. The rest take the defaults, chosen by the registers and shared memory of compiled kernels
(`benchmarks/compiled_kernels.py`)."""

WAYS = 32
"""Parts that a search in the prefix sum divides what is left into: two loads for 1,024 heads."""
COUNTED_TOGETHER = 256
"""Heads whose chunks are counted at once, where no append has counted them."""
MERGED_TOGETHER = (16, 128)
"""Fewest and most parts of a head that are merged at once: as many as the longest one can have, and registers hold."""
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
    chunk_ends: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dmc.kernels.reference.paged_attention`; there is no host sync."""
    assert key_pages.is_contiguous() and value_pages.is_contiguous()
    batch, query_heads, head_dim = query.shape
    kv_heads, num_blocks = block_tables.shape[1:]
    block_size, pairs, group = key_pages.shape[1], batch * kv_heads, query_heads // kv_heads
    tuning = tuning_of(query.device)
    most_chunks = triton.cdiv(num_blocks * block_size, CHUNK)
    num_programs = min(tuning.programs * _multiprocessors(query.device), pairs * most_chunks)
    lengths = lengths.contiguous()
    query = query if query.stride(-1) == 1 else query.contiguous()
    partial = query.new_empty(num_programs, 2, group, head_dim, dtype=torch.float32)
    partial_lse = partial.new_empty(partial.shape[:3])
    cuts = lengths.new_empty(num_programs, 2)
    num_scores = num_scores or num_blocks * block_size
    scores = partial.new_empty(batch, query_heads, num_scores) if return_scores else None
    lse = partial.new_empty(batch, query_heads) if return_scores else None
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    channels = max(16, triton.next_power_of_2(head_dim))
    row_bytes = channels * query.element_size()
    constants = {"GROUP": group, "HEAD_DIM": head_dim, "CHANNELS": channels}
    with torch.cuda.device_of(query):
        if chunk_ends is None:
            chunk_ends = lengths.new_empty(pairs)
            _ends_kernel[(1,)](lengths, rows, chunk_ends, pairs, KV_HEADS=kv_heads, CHUNK=CHUNK, PAIRS=COUNTED_TOGETHER)
        _attend_kernel[(num_programs,)](
            query,
            key_pages,
            value_pages,
            *(scales or (None, None)),
            bias,
            block_tables.contiguous(),
            lengths,
            chunk_ends,
            rows,
            None if recent is None else recent.key.contiguous(),
            None if recent is None else recent.value.contiguous(),
            None if recent is None else recent.exists.contiguous(),
            sinks,
            out,
            lse,
            partial,
            partial_lse,
            cuts,
            scores,
            query.stride(0),
            query.stride(1),
            pairs,
            num_blocks,
            0 if recent is None else len(recent.exists) // batch,
            num_scores,
            scaling * LOG2_E.value,
            KV_HEADS=kv_heads,
            BLOCK_SIZE=block_size,
            CHUNK=CHUNK,
            WAYS=WAYS,
            MEMBERS=max(16, triton.next_power_of_2(group)),
            KEYS=tile_keys(row_bytes, tuning.tile_bytes),
            RECENT_KEYS=16,
            STAGES=tuning.stages,
            num_warps=tile_warps(row_bytes),
            **constants,
        )
        fewest, most = MERGED_TOGETHER
        most = min(most, most * 128 // channels)
        parts = min(most, max(fewest, triton.next_power_of_2(min(num_programs, most_chunks))))
        _merge_kernel[(num_programs, group)](partial, partial_lse, cuts, out, lse, PARTS=parts, **constants)
        if scores is None:
            return out
        _normalize_kernel[(batch * query_heads, triton.cdiv(scores.shape[-1], SLOTS_NORMALIZED))](
            scores, lse, lengths, rows, scores.shape[-1], KV_HEADS=kv_heads, GROUP=group, SLOTS=SLOTS_NORMALIZED
        )
        return out, scores


@functools.cache
def tuning_of(device: torch.device) -> Tuning:
    """Return the tuning of a GPU, the default where it has not been measured."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return TUNINGS.get(capability, Tuning())


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def chunks_of(length, known, CHUNK: tl.constexpr):
    """Count the chunks of heads, one of an empty head too; none where not `known`."""
    return tl.where(known, tl.maximum(tl.cdiv(length, CHUNK), 1), 0)


@triton.jit
def _ends_kernel(lengths, rows, ends, num_pairs, KV_HEADS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr):
    """Write how many chunks there are up to the end of each head."""
    counted = tl.zeros((), tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        known = pair < num_pairs
        sequence, head = pair // KV_HEADS, pair % KV_HEADS
        row = sequence if rows is None else tl.load(rows + sequence, mask=known, other=0)
        chunks = chunks_of(tl.load(lengths + row * KV_HEADS + head, mask=known, other=0), known, CHUNK)
        tl.store(ends + pair, counted + tl.cumsum(chunks, 0), mask=known)
        counted += tl.sum(chunks, 0)


@triton.jit
def _head_of(chunk, ends, num_pairs, WAYS: tl.constexpr):
    """Find the first head that ends behind a chunk."""
    head = tl.zeros((), tl.int32)
    left = tl.zeros((), tl.int32) + num_pairs
    while left > 1:
        step = tl.cdiv(left, WAYS)
        last = head + (1 + tl.arange(0, WAYS)) * step - 1
        end = tl.load(ends + last, mask=last < num_pairs, other=2147483647)
        head += tl.sum((end <= chunk).to(tl.int32), 0) * step
        left = tl.minimum(step, num_pairs - head)
    return head


@triton.jit
def _attend_kernel(
    query,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    bias,
    block_tables,
    lengths,
    chunk_ends,
    rows,
    recent_key,
    recent_value,
    recent_exists,
    sinks,
    out,
    out_lse,
    partial,
    partial_lse,
    cuts,
    scores,
    query_stride,
    query_head_stride,
    num_pairs,
    num_blocks,
    num_recent,
    num_scores,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    RECENT_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to one run of the queue: the end of one head, whole heads, and the begin of another.

    The end, or middle, of a head that began in an earlier run is part 0 of the program, a begin that is cut is part 1.
    The recent tokens and the sinks of a head belong to its first chunk.
    """
    program = tl.program_id(0)
    total = tl.load(chunk_ends + num_pairs - 1)
    num_busy = tl.minimum(tl.num_programs(0), total)
    chunk = (tl.minimum(program, num_busy).to(tl.int64) * total // num_busy).to(tl.int32)
    end = (tl.minimum(program + 1, num_busy).to(tl.int64) * total // num_busy).to(tl.int32)
    pair = _head_of(chunk, chunk_ends, num_pairs, WAYS)  # the head of this chunk
    first = tl.load(chunk_ends + pair - 1, mask=pair > 0, other=0)  # chunks before that head

    member, channel = tl.arange(0, MEMBERS), tl.arange(0, CHANNELS)
    in_group = member < GROUP
    num_parts = tl.zeros((), tl.int32)
    while chunk < end:
        sequence, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
        row = sequence if rows is None else tl.load(rows + sequence)
        cell = row * KV_HEADS + head
        length = tl.load(lengths + cell)
        after = first + tl.maximum(tl.cdiv(length, CHUNK), 1)
        stop = tl.minimum(after, end)
        query_place = sequence * query_stride + (head * GROUP + member) * query_head_stride
        queries = load_rows(query, query_place, in_group, channel, HEAD_DIM)
        peak = tl.full((MEMBERS,), float("-inf"), tl.float32)
        sum_of_weights = tl.zeros((MEMBERS,), tl.float32)
        acc = tl.zeros((MEMBERS, CHANNELS), tl.float32)
        if sinks is not None:  # a key whose value is 0, of the head's first chunk
            has_sink = in_group & (chunk == first)
            peak, sum_of_weights = start_from_sinks(sinks, head * GROUP + member, has_sink)
        table = block_tables + cell * num_blocks
        query_head = pair.to(tl.int64) * GROUP + member
        for start in tl.range(
            (chunk - first) * CHUNK, tl.minimum((stop - first) * CHUNK, length), KEYS, num_stages=STAGES
        ):
            slot = start + tl.arange(0, KEYS)
            held = slot < length
            place = places(table, slot, held, BLOCK_SIZE)
            key = load_rows(key_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
            value = load_rows(value_pages, place * HEAD_DIM, held, channel, HEAD_DIM)
            score, peak, sum_of_weights, acc = attend_tile(
                queries,
                key,
                value,
                held[None, :],
                scaling,
                peak,
                sum_of_weights,
                acc,
                key_scales,
                value_scales,
                bias,
                place,
                held,
            )
            if scores is not None:
                score_place = scores + (query_head * num_scores)[:, None] + slot[None, :]
                tl.store(score_place, score, mask=in_group[:, None] & held[None, :])
        if recent_key is not None:
            for start in tl.range(0, tl.where(chunk == first, num_recent, 0), RECENT_KEYS, num_stages=1):
                index = start + tl.arange(0, RECENT_KEYS)
                held = index < num_recent
                exists = tl.load(recent_exists + sequence * num_recent + index, mask=held, other=0) != 0
                place = ((sequence * num_recent + index) * KV_HEADS + head) * HEAD_DIM
                key = load_rows(recent_key, place, exists, channel, HEAD_DIM)
                value = load_rows(recent_value, place, exists, channel, HEAD_DIM)
                _, peak, sum_of_weights, acc = attend_tile(
                    queries,
                    key,
                    value,
                    exists[None, :],
                    scaling,
                    peak,
                    sum_of_weights,
                    acc,
                    None,
                    None,
                    None,
                    place,
                    exists,
                )

        sum_of_weights = tl.where(sum_of_weights > 0, sum_of_weights, 1.0)  # of a head without slots
        lse = tl.where(peak == float("-inf"), 0.0, peak) + tl.log2(sum_of_weights)
        acc /= sum_of_weights[:, None]
        is_whole = (chunk == first) & (stop == after)
        written = in_group & is_whole
        in_head = (channel < HEAD_DIM)[None, :]
        target = query_head[:, None] * HEAD_DIM + channel[None, :]
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=written[:, None] & in_head)
        if out_lse is not None:
            tl.store(out_lse + query_head, lse, mask=written)
        written = in_group & (is_whole == 0)
        part = (2 * program + (chunk == first).to(tl.int32)) * GROUP + member
        tl.store(partial_lse + part, lse, mask=written)
        target = part[:, None] * HEAD_DIM + channel[None, :]
        tl.store(partial + target, acc, mask=written[:, None] & in_head)
        last_program = (after.to(tl.int64) * num_busy - 1) // total
        num_parts = tl.where((chunk == first) & (stop < after), last_program - program + 1, 0).to(tl.int32)
        chunk, first, pair = stop, after, pair + 1
    tl.store(cuts + 2 * program, pair - 1)
    tl.store(cuts + 2 * program + 1, num_parts)


@triton.jit
def _merge_kernel(
    partial,
    partial_lse,
    cuts,
    out,
    out_lse,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Average the parts of one query head of the head that one program has cut, if any, by shares of the softmax."""
    program, member = tl.program_id(0), tl.program_id(1)
    query_head = tl.load(cuts + 2 * program).to(tl.int64) * GROUP + member
    num_parts = tl.load(cuts + 2 * program + 1)
    channel = tl.arange(0, CHANNELS)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        place = (2 * (program + part) + (part == 0).to(tl.int32)) * GROUP + member
        lse = tl.load(partial_lse + place, mask=part < num_parts, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weight, fade = tl.exp2(lse - new_peak), tl.exp2(peak - new_peak)
        states = load_rows(partial, place * HEAD_DIM, weight > 0, channel, HEAD_DIM)
        acc = acc * fade + tl.sum(states * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        peak = new_peak
    is_cut = num_parts > 0
    total = tl.where(is_cut, total, 1.0)
    written = is_cut & (channel < HEAD_DIM)
    tl.store(out + query_head * HEAD_DIM + channel, (acc / total).to(out.dtype.element_ty), mask=written)
    if out_lse is not None:
        tl.store(out_lse + query_head, peak + tl.log2(total), mask=is_cut)


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
