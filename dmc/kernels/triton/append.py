"""Append or merge one new token per head: a kernel that plans for all heads, then one program per head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.compression import CompressionConfig
from dmc.kernels.base import LayerCache, NewTokens, Recent, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import history_size
from dmc.kernels.triton.append_chunk import PLANNED_TOGETHER, append_chunk, strides, with_dense_channels
from dmc.kernels.triton.decode import CHUNK, chunks_of

RECENT_TILE = 16
"""Raw recent tokens that one program rotates."""


def append_or_merge(
    cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, config: CompressionConfig | None
) -> VisibleKeys:
    """See `dmc.kernels.reference.append_or_merge`.

    There is no host sync, and with one token of each sequence no shape depends on data.
    """
    if batch.most_new > 1:
        return append_chunk(cache, batch, tokens, config)
    sequences, kv_heads = tokens.key.shape[:2]
    delay = 0 if config is None else config.delay
    constants = {"KV_HEADS": kv_heads, "DELAY": delay, "HISTORY": history_size(config)}
    slots = cache.lengths.new_empty(sequences, kv_heads)
    chunk_ends = slots.new_empty(slots.numel())
    targets = torch.empty_like(slots, dtype=torch.long)
    with torch.cuda.device_of(cache.lengths):
        _plan_kernel[(1,)](
            batch.row_index,
            batch.positions,
            tokens.decisions,
            cache.history_decisions,
            cache.lengths,
            cache.block_tables,
            cache.free_blocks,
            cache.num_free,
            slots,
            targets,
            chunk_ends,
            sequences * kv_heads,
            cache.block_tables.shape[-1],
            *strides(tokens.decisions),
            BLOCK_SIZE=cache.block_size,
            DROPS=config is not None and config.action == "drop",
            PAIRS=PLANNED_TOGETHER,
            CHUNK=CHUNK,
            **constants,
        )
        cos, sin = (None, None) if config is None or batch.rotary is None else batch.rotary
        _enter_heads(cache, batch, tokens, config, targets, (cos, sin), constants)
        recent = _recent(cache, batch, tokens, constants) if delay > 0 else None
        return VisibleKeys(slots, recent=recent, chunk_ends=chunk_ends)


def _enter_heads(
    cache: LayerCache,
    batch: ForwardBatch,
    tokens: NewTokens,
    config: CompressionConfig | None,
    targets: Tensor,
    rotary: tuple[Tensor | None, Tensor | None],
    constants: dict[str, int],
) -> None:
    pooling, window = "none", 1
    if config is not None and config.action == "merge":
        pooling = "window" if config.window_size is not None else "mean"
        window = config.window_size or 1
    key, value = with_dense_channels(tokens.key), with_dense_channels(tokens.value)
    head_dim = key.shape[-1]
    _enter_kernel[(targets.numel(),)](
        batch.row_index,
        batch.positions,
        targets,
        key,
        value,
        tokens.decisions,
        tokens.omega,
        *rotary,
        cache.key_pages,
        cache.value_pages,
        cache.key_scales,
        cache.value_scales,
        cache.history_key,
        cache.history_value,
        cache.history_decisions,
        cache.history_omega,
        cache.mean,
        cache.weight,
        *strides(key),
        *strides(value),
        *strides(tokens.decisions),
        *strides(tokens.omega),
        POOLING=pooling,
        WINDOW=window,
        AGES=triton.next_power_of_2(max(1, window - 1)),
        HALF=head_dim // 2,
        HALF_TILE=triton.next_power_of_2(head_dim // 2),
        **constants,
        num_warps=4 if window * head_dim >= 1024 else 1,
    )


def _recent(cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, constants: dict[str, int]) -> Recent:
    """Rotate the raw tokens that the delay holds back, out of the history."""
    assert batch.rotary is not None
    sequences, kv_heads, head_dim = tokens.key.shape
    delay = constants["DELAY"]
    key = tokens.key.new_empty(sequences * delay, kv_heads, head_dim)
    value = tokens.value.new_empty(key.shape)
    exists = torch.empty(sequences * delay, dtype=torch.bool, device=key.device)
    _recent_kernel[(sequences * kv_heads, triton.cdiv(delay, RECENT_TILE))](
        batch.row_index,
        batch.positions,
        *batch.rotary,
        cache.history_key,
        cache.history_value,
        key,
        value,
        exists,
        HALF=head_dim // 2,
        HALF_TILE=triton.next_power_of_2(head_dim // 2),
        TILE=RECENT_TILE,
        **constants,
    )
    return Recent(key, value, exists)


@triton.jit
def _plan_kernel(
    rows,
    positions,
    decisions,
    history_decisions,
    lengths,
    block_tables,
    free_blocks,
    num_free,
    slots,
    targets,
    chunk_ends,
    num_pairs,
    num_blocks,
    decisions_stride,
    decisions_head_stride,
    KV_HEADS: tl.constexpr,
    DELAY: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DROPS: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Give each (sequence, head) its new length, a block if it needs one, and the page slot to write (-1: none).

    Decode attention finds its work by the chunks of all heads up to each.
    """
    free = tl.load(num_free)
    taken = tl.zeros((), dtype=tl.int32)
    dealt = tl.zeros((), dtype=tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        known = pair < num_pairs
        sequence, head = pair // KV_HEADS, pair % KV_HEADS
        cell = tl.load(rows + sequence, mask=known, other=0) * KV_HEADS + head
        length = tl.load(lengths + cell, mask=known, other=0)
        appended = known
        writes = known
        if decisions is not None:
            entering = tl.load(positions + sequence, mask=known, other=0) - DELAY
            exists = known & (entering >= 0)
            if DELAY > 0:
                decision = history_decisions + cell * HISTORY + tl.where(exists, entering, 0) % HISTORY
            else:
                decision = decisions + sequence * decisions_stride + head * decisions_head_stride
            decided = tl.load(decision, mask=exists & (entering > 0), other=0) != 0
            appended = exists & (decided == 0)
            writes = appended if DROPS else exists
        needs = appended & (length % BLOCK_SIZE == 0)
        count = needs.to(tl.int32)
        rank = taken + tl.cumsum(count, 0) - count
        popped = tl.load(free_blocks + (free - 1 - rank), mask=needs, other=0)
        tl.debug_barrier()  # warps that hold the same heads have all read what one of them overwrites
        length += appended.to(tl.int32)
        last = tl.where(writes, length - 1, 0)
        entry = block_tables + cell * num_blocks + last // BLOCK_SIZE
        held = tl.load(entry, mask=writes & (needs == 0), other=0)
        tl.store(entry, popped, mask=needs)
        block = tl.where(needs, popped, held).to(tl.int64)
        tl.store(targets + pair, tl.where(writes, block * BLOCK_SIZE + last % BLOCK_SIZE, -1), mask=known)
        tl.store(lengths + cell, length, mask=known)
        tl.store(slots + pair, length, mask=known)
        chunks = chunks_of(length, known, CHUNK)
        tl.store(chunk_ends + pair, dealt + tl.cumsum(chunks, 0), mask=known)
        dealt += tl.sum(chunks, 0)
        taken += tl.sum(count, 0)
    tl.store(num_free, free - taken)


@triton.jit
def _halves(states, channel, HALF: tl.constexpr):
    """Load both halves of a head's channels, in float32."""
    known = channel < HALF
    first = tl.load(states + channel, mask=known, other=0.0)
    second = tl.load(states + HALF + channel, mask=known, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_halves(states, channel, first, second, keep, HALF: tl.constexpr):
    known = channel < tl.where(keep, HALF, 0)
    tl.store(states + channel, first.to(states.dtype.element_ty), mask=known)
    tl.store(states + HALF + channel, second.to(states.dtype.element_ty), mask=known)


@triton.jit
def _store_entry(pages, scales, slot, channel, first, second, HALF: tl.constexpr):
    """Write a head's state into a page slot, if it is not negative; with scales in 8 bits (`pages.quantize`)."""
    keep = slot >= 0
    slot = tl.where(keep, slot, 0)
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
        broken = tl.sum((first - first) + (second - second), 0)  # NaN if a state is not finite, which `max` may drop
        tl.store(scales + slot, largest / 127 + broken, mask=keep)
        inverse = tl.where(largest > 0, 127 / largest, 0.0)
        first, second = first * inverse, second * inverse
        first += tl.where(first < 0, -0.5, 0.5)  # truncated below
        second += tl.where(second < 0, -0.5, 0.5)
    _store_halves(pages + slot * 2 * HALF, channel, first, second, keep, HALF)


@triton.jit
def _average(states, place, weight, channel, HALF: tl.constexpr):
    """Sum entries of the history, [tokens], weighted; those of weight 0 are not read."""
    known = (weight > 0)[:, None] & (channel < HALF)[None, :]
    entry = states + place[:, None] * (2 * HALF) + channel[None, :]
    first = tl.load(entry, mask=known, other=0.0).to(tl.float32)
    second = tl.load(entry + HALF, mask=known, other=0.0).to(tl.float32)
    return tl.sum(first * weight[:, None], 0), tl.sum(second * weight[:, None], 0)


@triton.jit
def _rotated(first, second, cos, sin, channel, HALF: tl.constexpr):
    """Half-split RoPE."""
    cos_first, cos_second = _halves(cos, channel, HALF)
    sin_first, sin_second = _halves(sin, channel, HALF)
    return first * cos_first - second * sin_first, second * cos_second + first * sin_second


@triton.jit
def _enter_kernel(
    rows,
    positions,
    targets,
    key,
    value,
    decisions,
    omega,
    cos,
    sin,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    history_key,
    history_value,
    history_decisions,
    history_omega,
    mean,
    mean_weight,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    decisions_stride,
    decisions_head_stride,
    omega_stride,
    omega_head_stride,
    KV_HEADS: tl.constexpr,
    DELAY: tl.constexpr,
    HISTORY: tl.constexpr,
    POOLING: tl.constexpr,
    WINDOW: tl.constexpr,
    AGES: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Write one head's entering state into its page slot, and its new token into the history."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    cell = tl.load(rows + sequence) * KV_HEADS + head
    position = tl.load(positions + sequence)
    target = tl.load(targets + pair)
    entering = position - DELAY
    exists = entering >= 0
    channel = tl.arange(0, HALF_TILE)
    new_key = key + sequence * key_stride + head * key_head_stride
    new_value = value + sequence * value_stride + head * value_head_stride
    place = cell * HISTORY
    if DELAY > 0:
        place += tl.where(exists, entering, 0) % HISTORY
        key_first, key_second = _halves(history_key + place * 2 * HALF, channel, HALF)
        value_first, value_second = _halves(history_value + place * 2 * HALF, channel, HALF)
    else:
        key_first, key_second = _halves(new_key, channel, HALF)
        value_first, value_second = _halves(new_value, channel, HALF)

    if POOLING != "none":
        if DELAY > 0:
            decided = tl.load(history_decisions + place) != 0
            importance = tl.load(history_omega + place)
        else:
            decided = tl.load(decisions + sequence * decisions_stride + head * decisions_head_stride) != 0
            importance = tl.load(omega + sequence * omega_stride + head * omega_head_stride)
        merges = decided & (entering > 0)
        total = tl.where(exists, importance.to(tl.float32), 1.0)
        key_first, key_second = key_first * total, key_second * total
        value_first, value_second = value_first * total, value_second * total
        if POOLING == "window":
            if WINDOW > 1:
                age = 1 + tl.arange(0, AGES)
                in_reach = age <= tl.where(merges, tl.minimum(entering, WINDOW - 1), 0)
                past = tl.where(in_reach, entering - age, 0)
                places = cell * HISTORY + past % HISTORY
                goes_on = tl.load(history_decisions + places, mask=in_reach & (past > 0), other=0) != 0
                ended = tl.where(goes_on, 0, 1)
                in_slot = in_reach & (tl.cumsum(ended, 0) - ended == 0)
                weight = tl.load(history_omega + places, mask=in_slot, other=0.0)
                total += tl.sum(weight, 0)
                past_first, past_second = _average(history_key, places, weight, channel, HALF)
                key_first += past_first
                key_second += past_second
                past_first, past_second = _average(history_value, places, weight, channel, HALF)
                value_first += past_first
                value_second += past_second
        else:
            weight = tl.where(merges, tl.load(mean_weight + cell), 0.0)
            total += weight
            past_first, past_second = _halves(mean + cell * 4 * HALF, channel, HALF)
            key_first += past_first * weight
            key_second += past_second * weight
            past_first, past_second = _halves(mean + cell * 4 * HALF + 2 * HALF, channel, HALF)
            value_first += past_first * weight
            value_second += past_second * weight
        key_first, key_second = key_first / total, key_second / total
        value_first, value_second = value_first / total, value_second / total

    tl.debug_barrier()  # every warp has read the mean, and the history entry that the new token may overwrite
    if POOLING == "mean":
        tl.store(mean_weight + cell, tl.where(exists, total, 0.0))
        own_mean = mean + cell * 4 * HALF
        _store_halves(own_mean, channel, key_first, key_second, exists, HALF)
        _store_halves(own_mean + 2 * HALF, channel, value_first, value_second, exists, HALF)
    if cos is not None:
        turn = sequence * (DELAY + 1) * 2 * HALF
        key_first, key_second = _rotated(key_first, key_second, cos + turn, sin + turn, channel, HALF)
    _store_entry(key_pages, key_scales, target, channel, key_first, key_second, HALF)
    _store_entry(value_pages, value_scales, target, channel, value_first, value_second, HALF)

    if HISTORY > 0:
        place = cell * HISTORY + position % HISTORY
        first, second = _halves(new_key, channel, HALF)
        _store_halves(history_key + place * 2 * HALF, channel, first, second, True, HALF)
        first, second = _halves(new_value, channel, HALF)
        _store_halves(history_value + place * 2 * HALF, channel, first, second, True, HALF)
        decision = tl.load(decisions + sequence * decisions_stride + head * decisions_head_stride)
        tl.store(history_decisions + place, decision)
        tl.store(history_omega + place, tl.load(omega + sequence * omega_stride + head * omega_head_stride))


@triton.jit
def _recent_kernel(
    rows,
    positions,
    cos,
    sin,
    history_key,
    history_value,
    recent_key,
    recent_value,
    recent_exists,
    KV_HEADS: tl.constexpr,
    DELAY: tl.constexpr,
    HISTORY: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy the last DELAY tokens of one head's history in order, keys rotated."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    cell = tl.load(rows + sequence) * KV_HEADS + head
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = tl.load(positions + sequence) - DELAY + 1 + index
    exists = (index < DELAY) & (position >= 0)
    channel = tl.arange(0, HALF_TILE)
    known = exists[:, None] & (channel < HALF)[None, :]
    written = (index < DELAY)[:, None] & (channel < HALF)[None, :]
    place = cell * HISTORY + tl.where(exists, position, 0) % HISTORY
    source = place[:, None] * (2 * HALF) + channel[None, :]
    target = ((sequence * DELAY + index) * KV_HEADS + head)[:, None] * (2 * HALF) + channel[None, :]
    turn = (sequence * (DELAY + 1) + 1 + index)[:, None] * (2 * HALF) + channel[None, :]
    first = tl.load(history_key + source, mask=known, other=0.0).to(tl.float32)
    second = tl.load(history_key + source + HALF, mask=known, other=0.0).to(tl.float32)
    rotated_first = first * tl.load(cos + turn, mask=known, other=0.0)
    rotated_first -= second * tl.load(sin + turn, mask=known, other=0.0)
    rotated_second = second * tl.load(cos + turn + HALF, mask=known, other=0.0)
    rotated_second += first * tl.load(sin + turn + HALF, mask=known, other=0.0)
    tl.store(recent_key + target, rotated_first.to(recent_key.dtype.element_ty), mask=written)
    tl.store(recent_key + target + HALF, rotated_second.to(recent_key.dtype.element_ty), mask=written)
    for offset in tl.static_range(0, 2 * HALF, HALF):
        tl.store(
            recent_value + target + offset,
            tl.load(history_value + source + offset, mask=known, other=0.0),
            mask=written,
        )
    tl.store(recent_exists + sequence * DELAY + index, exists, mask=index < tl.where(head == 0, DELAY, 0))
