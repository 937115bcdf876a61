"""Append or merge several tokens of each sequence: count, take blocks, pool and write tile by tile, then keep the rest.

A token's state is a product: the importance of the tokens of its slot and window, a banded triangular matrix, times
their keys and values. Tiles of 16 tokens are independent but for exact means, which a program carries along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmc.compression import CompressionConfig
from dmc.kernels.base import LayerCache, NewTokens, OpenSlotState, Recent, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import history_size

PLANNED_TOGETHER = 256
"""Heads that a planning program handles at once: no number of sequences compiles a kernel of its own."""
COUNTED_TOGETHER = 256
"""Tokens of a head that are counted at once."""
TILE = 16
"""Tokens whose states one program computes together."""


def strides(states: Tensor | None) -> tuple[int, int]:
    """Strides of tokens and heads."""
    return (0, 0) if states is None else (states.stride(0), states.stride(1))


def with_dense_channels(states: Tensor) -> Tensor:
    """Copy keys or values unless their channels lie side by side."""
    return states if states.stride(-1) == 1 else states.contiguous()


def append_chunk(
    cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, config: CompressionConfig | None
) -> VisibleKeys:
    """See `dmc.kernels.reference.append_or_merge`; there is no host sync."""
    num_tokens, kv_heads, head_dim = tokens.key.shape
    delay, window, pooling = 0 if config is None else config.delay, 1, "none"
    if config is not None and config.action == "merge":
        pooling = "mean" if config.window_size is None else "window"
        window = config.window_size or 1
    history = history_size(config)
    heads = {"KV_HEADS": kv_heads, "DELAY": delay, "HISTORY": history}
    halves = {"HALF": head_dim // 2, "HALF_TILE": max(16, triton.next_power_of_2(head_dim // 2))}
    rings = cache.history_key, cache.history_value, cache.history_decisions, cache.history_omega
    new = NewTokens(with_dense_channels(tokens.key), with_dense_channels(tokens.value), tokens.decisions, tokens.omega)
    where = batch.row_index, batch.begin_index, batch.cu_seqlens
    pairs, ages = len(batch.rows) * kv_heads, triton.next_power_of_2(max(1, window - 1))
    counts = cache.lengths.new_empty(num_tokens, kv_heads)
    slots = torch.empty_like(counts) if pooling != "none" else None
    plan = counts.new_empty(3, pairs)  # lengths after, lengths before, and the place of block 0 in the free stack
    before = counts.new_empty(pairs, ages) if window > 1 else None
    with torch.cuda.device_of(cache.lengths):
        _count_kernel[(pairs,)](
            *where, tokens.decisions, cache.history_decisions, cache.lengths, counts, slots, plan, before,
            *strides(tokens.decisions), WINDOW=window, AGES=ages, TOKENS=COUNTED_TOGETHER, **heads,
        )  # fmt: skip
        _take_kernel[(1,)](
            batch.row_index, cache.lengths, cache.num_free, plan, pairs,
            KV_HEADS=kv_heads, BLOCK_SIZE=cache.block_size, PAIRS=PLANNED_TOGETHER,
        )  # fmt: skip
        open_slot = _enter_chunk(cache, batch, new, (counts, plan, before), (pooling, window), heads | halves)
        recent = _recent(batch, new, rings, heads | halves) if delay > 0 else None
        if history > 0:
            _remember_kernel[(pairs, triton.cdiv(history, TILE))](
                *where, new.key, new.value, new.decisions, new.omega, *rings, *strides(new.key), *strides(new.value),
                *strides(new.decisions), *strides(new.omega), TILE=TILE, **heads, **halves,
            )  # fmt: skip
    return VisibleKeys(counts if slots is None else slots, open_slot, recent, is_causal=config is None)


def _enter_chunk(
    cache: LayerCache,
    batch: ForwardBatch,
    new: NewTokens,
    planned: tuple[Tensor, Tensor, Tensor | None],
    pools: tuple[str, int],
    constants: dict[str, int],
) -> OpenSlotState | None:
    (pooling, window), open_slot = pools, None
    if pooling != "none":
        states = torch.empty(new.key.shape, dtype=new.key.dtype, device=new.key.device)
        exists = torch.empty(len(states), dtype=torch.bool, device=states.device)
        open_slot = OpenSlotState(states, torch.empty_like(states), exists)
    covered = batch.most_new if pooling == "mean" else TILE
    tiles = batch.tiles(covered)
    is_wide = new.key.element_size() == 4 and cache.scales is not None and constants["HALF_TILE"] > 32
    _enter_chunk_kernel[(len(tiles), constants["KV_HEADS"])](
        tiles, batch.row_index, batch.begin_index, batch.cu_seqlens, *planned,
        new.key, new.value, new.omega, *((None, None) if batch.rotary is None else batch.rotary),
        cache.free_blocks, cache.block_tables, cache.key_pages, cache.value_pages, cache.key_scales, cache.value_scales,
        cache.history_key, cache.history_value, cache.history_omega, cache.mean, cache.weight,
        *((None, None, None) if open_slot is None else (open_slot.key, open_slot.value, open_slot.exists)),
        cache.block_tables.shape[-1], covered, len(batch.rows) * constants["KV_HEADS"],
        *strides(new.key), *strides(new.value), *strides(new.omega),
        BLOCK_SIZE=cache.block_size, POOLING=pooling, WINDOW=window,
        AGES=1 if planned[2] is None else planned[2].shape[1], TILE=TILE, **constants,
        num_warps=8 if is_wide else 4,  # with 4 its rounding to 8 bits spills
    )  # fmt: skip
    return open_slot


def _recent(batch: ForwardBatch, new: NewTokens, rings: tuple[Tensor, ...], constants: dict[str, int]) -> Recent:
    """Rotate the raw tokens that the delay holds back, those before the new ones out of the history."""
    assert batch.rotary is not None
    delay, wide = constants["DELAY"], batch.extended(constants["DELAY"] - 1)
    key = new.key.new_empty(wide.num_tokens, *new.key.shape[1:])
    value = new.value.new_empty(key.shape)
    exists = torch.empty(len(key), dtype=torch.bool, device=key.device)
    tiles = wide.tiles(TILE)
    _recent_chunk_kernel[(len(tiles), constants["KV_HEADS"])](
        tiles, batch.row_index, batch.begin_index, batch.cu_seqlens, new.key, new.value, *batch.rotary, *rings[:2],
        key, value, exists, *strides(new.key), *strides(new.value), TILE=TILE, **constants,
    )  # fmt: skip
    assert delay > 0
    return Recent(key, value, exists)


@triton.jit
def _count_kernel(
    rows,
    begins,
    cu_seqlens,
    decisions,
    history_decisions,
    lengths,
    counts,
    slots,
    plan,
    before,
    decisions_stride,
    decisions_head_stride,
    KV_HEADS: tl.constexpr,
    DELAY: tl.constexpr,
    HISTORY: tl.constexpr,
    WINDOW: tl.constexpr,
    AGES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Count one head's slots after each token, after all, and after each token of the window before them."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    cell = tl.load(rows + sequence) * KV_HEADS + head
    start, begin = tl.load(cu_seqlens + sequence), tl.load(begins + sequence)
    num_new = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    length = tl.load(lengths + cell)
    if before is not None:
        age = 1 + tl.arange(0, AGES)
        past = begin - DELAY - age
        in_reach = (age < WINDOW) & (past >= 0)
        past_place = cell * HISTORY + tl.where(in_reach, past, 0) % HISTORY
        went_on = tl.load(history_decisions + past_place, mask=in_reach & (past > 0), other=0) != 0
        starts = (in_reach & (went_on == 0)).to(tl.int32)
        tl.store(before + pair * AGES + age - 1, length - tl.cumsum(starts, 0) + starts)
    for first in range(0, num_new, TOKENS):
        offset = first + tl.arange(0, TOKENS)
        appended = offset < num_new
        if decisions is not None:
            entering = begin + offset - DELAY
            exists = appended & (entering >= 0)
            asked = exists & (entering > 0)
            place = (start + offset - DELAY) * decisions_stride + head * decisions_head_stride
            merges = tl.load(decisions + place, mask=asked & (offset >= DELAY), other=0) != 0
            if DELAY > 0:
                place = cell * HISTORY + tl.where(exists, entering, 0) % HISTORY
                merges |= tl.load(history_decisions + place, mask=asked & (offset < DELAY), other=0) != 0
            appended = exists & (merges == 0)
        count = length + tl.cumsum(appended.to(tl.int32), 0)
        target = (start + offset) * KV_HEADS + head
        tl.store(counts + target, count, mask=offset < num_new)
        if slots is not None:
            tl.store(slots + target, tl.maximum(count - 1, 0), mask=offset < num_new)
        length += tl.sum(appended.to(tl.int32), 0)
    tl.store(plan + pair, length)


@triton.jit
def _take_kernel(
    rows, lengths, num_free, plan, num_pairs, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAIRS: tl.constexpr
):
    """Grow the lengths of all heads, and say where in the free stack each one's new blocks lie."""
    free = tl.load(num_free)
    taken = tl.zeros((), dtype=tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        known = pair < num_pairs
        cell = tl.load(rows + pair // KV_HEADS, mask=known, other=0) * KV_HEADS + pair % KV_HEADS
        old, new = tl.load(lengths + cell, mask=known, other=0), tl.load(plan + pair, mask=known, other=0)
        held = tl.cdiv(old, BLOCK_SIZE)
        needs = tl.cdiv(new, BLOCK_SIZE) - held
        rank = taken + tl.cumsum(needs, 0) - needs
        tl.debug_barrier()  # warps that hold the same heads have all read what one of them overwrites
        tl.store(plan + num_pairs + pair, old, mask=known)
        tl.store(plan + 2 * num_pairs + pair, free - 1 - rank + held, mask=known)
        tl.store(lengths + cell, new, mask=known)
        taken += tl.sum(needs, 0)
    tl.store(num_free, free - taken)


@triton.jit
def _raw_halves(new, ring, source, place, is_new, is_old, channel, HALF: tl.constexpr):
    """Load both halves of tokens [tokens, channels] in float32, out of the new ones or the history; 0 of no token."""
    inside = (channel < HALF)[None, :]
    near, far = new + source[:, None] + channel[None, :], ring + place[:, None] + channel[None, :]
    first = tl.load(near, mask=is_new[:, None] & inside, other=0.0).to(tl.float32)
    second = tl.load(near + HALF, mask=is_new[:, None] & inside, other=0.0).to(tl.float32)
    first += tl.load(far, mask=is_old[:, None] & inside, other=0.0).to(tl.float32)
    second += tl.load(far + HALF, mask=is_old[:, None] & inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _rotated_rows(first, second, cos, sin, turn, known, channel, HALF: tl.constexpr):
    """Half-split RoPE of [tokens, channels] by the tables' rows `turn`."""
    inside = known[:, None] & (channel < HALF)[None, :]
    place = turn[:, None] * (2 * HALF) + channel[None, :]
    turned = first * tl.load(cos + place, mask=inside, other=0.0)
    turned -= second * tl.load(sin + place, mask=inside, other=0.0)
    other = second * tl.load(cos + place + HALF, mask=inside, other=0.0)
    other += first * tl.load(sin + place + HALF, mask=inside, other=0.0)
    return turned, other


@triton.jit
def _store_rows(states, place, first, second, keep, channel, HALF: tl.constexpr):
    mask = keep[:, None] & (channel < HALF)[None, :]
    target = states + place[:, None] + channel[None, :]
    tl.store(target, first.to(states.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(states.dtype.element_ty), mask=mask)


@triton.jit
def _write_rows(pages, scales, slot, stays, open_slot, at_top, exists, first, second, channel, HALF: tl.constexpr):
    """Write states [tokens, channels] into their page slots where they stay, as `pages.quantize` with scales.

    As they can be read again they go to `open_slot`, if it is not None.
    """
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        broken = tl.sum((first - first) + (second - second), 1)  # NaN if a state is not finite, which `max` may drop
        scale = largest / 127 + broken
        tl.store(scales + slot, scale, mask=stays)
        inverse = tl.where(largest > 0, 127 / largest, 0.0)[:, None]
        first, second = first * inverse, second * inverse
        first = (first + tl.where(first < 0, -0.5, 0.5)).to(tl.int8)  # truncated
        second = (second + tl.where(second < 0, -0.5, 0.5)).to(tl.int8)
    _store_rows(pages, slot * 2 * HALF, first, second, stays, channel, HALF)
    if open_slot is not None:
        if scales is not None:
            first, second = first.to(tl.float32) * scale[:, None], second.to(tl.float32) * scale[:, None]
        _store_rows(open_slot, at_top * 2 * HALF, first, second, exists, channel, HALF)


@triton.jit
def _enter_chunk_kernel(
    tiles,
    rows,
    begins,
    cu_seqlens,
    counts,
    plan,
    before,
    key,
    value,
    omega,
    cos,
    sin,
    free_blocks,
    block_tables,
    key_pages,
    value_pages,
    key_scales,
    value_scales,
    history_key,
    history_value,
    history_omega,
    mean,
    mean_weight,
    top_key,
    top_value,
    top_exists,
    num_blocks,
    covered,
    num_pairs,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    omega_stride,
    omega_head_stride,
    KV_HEADS: tl.constexpr,
    DELAY: tl.constexpr,
    HISTORY: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    POOLING: tl.constexpr,
    WINDOW: tl.constexpr,
    AGES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the states of one head's entering tokens, `covered` of them, that no later token of the call replaces."""
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    first_token = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    pair = sequence * KV_HEADS + head
    cell = tl.load(rows + sequence) * KV_HEADS + head
    start, begin = tl.load(cu_seqlens + sequence), tl.load(begins + sequence)
    num_new = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    old = tl.load(plan + num_pairs + pair)
    block_zero = tl.load(plan + 2 * num_pairs + pair)
    table = block_tables + cell * num_blocks
    held_blocks = tl.cdiv(old, BLOCK_SIZE)
    channel, row = tl.arange(0, HALF_TILE), tl.arange(0, TILE)
    if POOLING == "mean":
        inside, own_mean = channel < HALF, mean + cell * 4 * HALF + channel
        carried_weight = tl.load(mean_weight + cell)
        carried_count = old
        carried_key = tl.load(own_mean, mask=inside, other=0.0)
        carried_other_key = tl.load(own_mean + HALF, mask=inside, other=0.0)
        carried_value = tl.load(own_mean + 2 * HALF, mask=inside, other=0.0)
        carried_other_value = tl.load(own_mean + 3 * HALF, mask=inside, other=0.0)
    for tile in range(first_token, tl.minimum(first_token + covered, num_new), TILE):
        offset = tile + row
        known = offset < num_new
        token = start + offset
        entering = begin + offset - DELAY
        exists = known & (entering >= 0)
        cell_of_count = counts + token * KV_HEADS + head
        count = tl.load(cell_of_count, mask=known, other=0)
        previous = tl.load(cell_of_count - KV_HEADS, mask=known & (offset > 0), other=0)
        appended = known & (count > tl.where(offset > 0, previous, old))
        key_first = tl.zeros((TILE, HALF_TILE), tl.float32)
        key_second = tl.zeros((TILE, HALF_TILE), tl.float32)
        value_first = tl.zeros((TILE, HALF_TILE), tl.float32)
        value_second = tl.zeros((TILE, HALF_TILE), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        broken_rows = tl.zeros((TILE,), tl.int32)
        halo: tl.constexpr = (WINDOW - 1 + TILE - 1) // TILE * TILE
        for source_tile in tl.range(tile - halo, tile + TILE, TILE, num_stages=1):
            other = source_tile + row
            position = begin + other - DELAY
            held = (other < num_new) & (position >= 0) & (other > -WINDOW)
            is_new, is_old = held & (other >= DELAY), held & (other < DELAY)
            source = start + other - DELAY
            place = tl.zeros((TILE,), tl.int64)
            if HISTORY > 0:
                place = cell * HISTORY + tl.where(is_old, position, 0) % HISTORY
            first_key, second_key = _raw_halves(
                key, history_key, source * key_stride + head * key_head_stride, place * 2 * HALF,
                is_new, is_old, channel, HALF,
            )  # fmt: skip
            first_value, second_value = _raw_halves(
                value, history_value, source * value_stride + head * value_head_stride, place * 2 * HALF,
                is_new, is_old, channel, HALF,
            )  # fmt: skip
            if POOLING == "none":
                key_first, key_second, value_first, value_second = first_key, second_key, first_value, second_value
            else:
                weight = tl.load(omega + source * omega_stride + head * omega_head_stride, mask=is_new, other=0.0)
                weight = weight.to(tl.float32)
                if HISTORY > 0:
                    weight += tl.load(history_omega + place, mask=is_old, other=0.0)
                slot = tl.load(counts + (start + other) * KV_HEADS + head, mask=held & (other >= 0), other=0)
                if before is not None:
                    slot += tl.load(before + pair * AGES - other - 1, mask=held & (other < 0), other=0)
                checked = weight + tl.sum(first_key + second_key, 1) + tl.sum(first_value + second_value, 1)
                broken = (checked - checked) != 0  # a NaN or an infinity, which marks its own slot alone
                sound = (broken == 0)[:, None]
                weight = tl.where(broken, 1.0, weight)
                reaches = (slot[None, :] == count[:, None]) & held[None, :] & (other[None, :] <= offset[:, None])
                if POOLING == "window":
                    reaches = reaches & (offset[:, None] - other[None, :] < WINDOW)
                weights = tl.where(reaches, weight[None, :], 0.0)
                broken_rows += tl.sum((reaches & broken[None, :]).to(tl.int32), 1)
                total += tl.sum(weights, 1)
                key_first += tl.dot(weights, tl.where(sound, first_key, 0.0), input_precision="ieee")
                key_second += tl.dot(weights, tl.where(sound, second_key, 0.0), input_precision="ieee")
                value_first += tl.dot(weights, tl.where(sound, first_value, 0.0), input_precision="ieee")
                value_second += tl.dot(weights, tl.where(sound, second_value, 0.0), input_precision="ieee")
        stays = appended
        if POOLING != "none":
            if POOLING == "mean":
                goes_on = exists & (count == carried_count)
                weight = tl.where(goes_on, carried_weight, 0.0)
                total += weight
                goes_on, weight = goes_on[:, None], weight[:, None]
                key_first += tl.where(goes_on, weight * carried_key[None, :], 0.0)
                key_second += tl.where(goes_on, weight * carried_other_key[None, :], 0.0)
                value_first += tl.where(goes_on, weight * carried_value[None, :], 0.0)
                value_second += tl.where(goes_on, weight * carried_other_value[None, :], 0.0)
            divisor = tl.where(exists, total, 1.0)
            divisor = tl.where(broken_rows > 0, float("nan"), divisor)[:, None]
            key_first, key_second = key_first / divisor, key_second / divisor
            value_first, value_second = value_first / divisor, value_second / divisor
            if POOLING == "mean":
                last = row == tl.minimum(num_new - tile, TILE) - 1
                carried_count = tl.sum(tl.where(last, count, 0), 0)
                carried_weight = tl.sum(tl.where(last & exists, total, 0.0), 0)
                last = (last & exists)[:, None]
                carried_key = tl.sum(tl.where(last, key_first, 0.0), 0)
                carried_other_key = tl.sum(tl.where(last, key_second, 0.0), 0)
                carried_value = tl.sum(tl.where(last, value_first, 0.0), 0)
                carried_other_value = tl.sum(tl.where(last, value_second, 0.0), 0)
            following = tl.load(cell_of_count + KV_HEADS, mask=known & (offset + 1 < num_new), other=0)
            stays = exists & ((offset + 1 == num_new) | (following > count))
        if cos is not None:
            turn = token + sequence * DELAY
            key_first, key_second = _rotated_rows(key_first, key_second, cos, sin, turn, known, channel, HALF)
        last_slot = tl.maximum(count - 1, 0)
        block = last_slot // BLOCK_SIZE
        is_taken = block >= held_blocks
        page = tl.load(table + block, mask=stays & (is_taken == 0), other=0)
        popped = tl.load(free_blocks + block_zero - block, mask=(stays | appended) & is_taken, other=0)
        tl.store(table + block, popped, mask=appended & (last_slot % BLOCK_SIZE == 0))
        page = tl.where(is_taken, popped, page).to(tl.int64)
        slot = page * BLOCK_SIZE + last_slot % BLOCK_SIZE
        at_top = token * KV_HEADS + head
        _write_rows(key_pages, key_scales, slot, stays, top_key, at_top, exists, key_first, key_second, channel, HALF)
        _write_rows(
            value_pages,
            value_scales,
            slot,
            stays,
            top_value,
            at_top,
            exists,
            value_first,
            value_second,
            channel,
            HALF,
        )
        if top_exists is not None:
            tl.store(top_exists + token, exists, mask=known & (head == 0))
    if POOLING == "mean":
        tl.debug_barrier()  # every warp has read the mean
        tl.store(mean_weight + cell, carried_weight)
        tl.store(own_mean, carried_key, mask=inside)
        tl.store(own_mean + HALF, carried_other_key, mask=inside)
        tl.store(own_mean + 2 * HALF, carried_value, mask=inside)
        tl.store(own_mean + 3 * HALF, carried_other_value, mask=inside)


@triton.jit
def _recent_chunk_kernel(
    tiles,
    rows,
    begins,
    cu_seqlens,
    key,
    value,
    cos,
    sin,
    history_key,
    history_value,
    recent_key,
    recent_value,
    recent_exists,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    DELAY: tl.constexpr,
    HISTORY: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy one head's new tokens, and the DELAY - 1 before them, in order, keys rotated."""
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    index = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, TILE)
    head = tl.program_id(1)
    cell = tl.load(rows + sequence) * KV_HEADS + head
    start = tl.load(cu_seqlens + sequence)
    num_new = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    offset = index - (DELAY - 1)
    position = tl.load(begins + sequence) + offset
    known = offset < num_new
    exists = known & (position >= 0)
    is_new, is_old = exists & (offset >= 0), exists & (offset < 0)
    channel = tl.arange(0, HALF_TILE)
    source = start + offset
    place = (cell * HISTORY + tl.where(is_old, position, 0) % HISTORY) * (2 * HALF)
    first, second = _raw_halves(
        key, history_key, source * key_stride + head * key_head_stride, place, is_new, is_old, channel, HALF
    )
    turn = start + sequence * DELAY + index + 1
    first, second = _rotated_rows(first, second, cos, sin, turn, exists, channel, HALF)
    row = start + sequence * (DELAY - 1) + index
    target = (row * KV_HEADS + head) * (2 * HALF)
    _store_rows(recent_key, target, first, second, known, channel, HALF)
    first, second = _raw_halves(
        value, history_value, source * value_stride + head * value_head_stride, place, is_new, is_old, channel, HALF
    )
    _store_rows(recent_value, target, first, second, known, channel, HALF)
    tl.store(recent_exists + row, exists, mask=known & (head == 0))


@triton.jit
def _remember_kernel(
    rows,
    begins,
    cu_seqlens,
    key,
    value,
    decisions,
    omega,
    history_key,
    history_value,
    history_decisions,
    history_omega,
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
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write one head's last new tokens into its history."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // KV_HEADS, pair % KV_HEADS
    cell = tl.load(rows + sequence) * KV_HEADS + head
    start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    age = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = end - 1 - age
    kept = (age < HISTORY) & (token >= start)
    position = tl.load(begins + sequence) + token - start
    place = cell * HISTORY + tl.where(kept, position, 0) % HISTORY
    channel = tl.arange(0, HALF_TILE)
    mask = kept[:, None] & (channel < HALF)[None, :]
    target = place[:, None] * (2 * HALF) + channel[None, :]
    near_key = (token * key_stride + head * key_head_stride)[:, None] + channel[None, :]
    near_value = (token * value_stride + head * value_head_stride)[:, None] + channel[None, :]
    for half in tl.static_range(0, 2 * HALF, HALF):
        tl.store(history_key + target + half, tl.load(key + near_key + half, mask=mask, other=0.0), mask=mask)
        tl.store(history_value + target + half, tl.load(value + near_value + half, mask=mask, other=0.0), mask=mask)
    decision = tl.load(decisions + token * decisions_stride + head * decisions_head_stride, mask=kept, other=0)
    tl.store(history_decisions + place, decision, mask=kept)
    importance = tl.load(omega + token * omega_stride + head * omega_head_stride, mask=kept, other=0.0)
    tl.store(history_omega + place, importance, mask=kept)
