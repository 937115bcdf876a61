"""Triton kernels that gather the keys that count: first their numbers, by a running count of each head, then states."""

from __future__ import annotations

import triton
import triton.language as tl

from dmc.models.masked_attention.kernels import load_hidden, load_states, store_states


@triton.jit
def number_kernel(
    bias,
    hidden,
    kept_bias,
    places,
    counts,
    time,
    skip_below,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Number the kept keys of one KV head of one sequence: where each was, its bias, and how many are before a place.

    Behind the last one places are `time` and biases 0.
    """
    pair = tl.program_id(0).to(tl.int64)
    biases, count = bias + pair * time, 0
    for begin in tl.range(0, time, KEYS):
        column = begin + tl.arange(0, KEYS)
        exists = column < time
        of_key = tl.load(biases + column, mask=exists, other=float("-inf"))
        keep = exists & (of_key > skip_below)
        if hidden is not None:
            keep = keep & ~load_hidden(hidden, pair // KV_HEADS, column, exists, time)
        kept = keep.to(tl.int32)
        before = count + tl.cumsum(kept, 0) - kept
        tl.store(counts + pair * (time + 1) + column, before, mask=exists)
        tl.store(places + pair * time + before, column, mask=keep)
        tl.store(kept_bias + pair * time + before, of_key, mask=keep)
        count += tl.sum(kept, 0)
    tl.store(counts + pair * (time + 1) + time, count)
    for begin in tl.range(0, time, KEYS):
        slot = begin + tl.arange(0, KEYS)
        is_behind = (slot >= count) & (slot < time)
        tl.store(places + pair * time + slot, tl.zeros((KEYS,), tl.int32) + time, mask=is_behind)
        tl.store(kept_bias + pair * time + slot, tl.zeros((KEYS,), tl.float32), mask=is_behind)


@triton.jit
def gather_kernel(
    key,
    value,
    places,
    kept_key,
    kept_value,
    key_strides,
    value_strides,
    kept_strides,
    time,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Gather a block of kept keys and values of one KV head; behind the last one they are 0."""
    pair, begin = tl.program_id(1).to(tl.int64), tl.program_id(0) * KEYS
    batch, head = pair // KV_HEADS, pair % KV_HEADS
    index, channel = tl.arange(0, KEYS), tl.arange(0, CHANNELS)
    is_slot = begin + index < time
    column = tl.load(places + pair * time + begin + index, mask=is_slot, other=time)
    keys = load_states(key, key_strides, batch, head, 0, column, column < time, channel, HEAD_DIM)
    store_states(kept_key, kept_strides, batch, head, begin, index, is_slot, channel, keys, HEAD_DIM)
    values = load_states(value, value_strides, batch, head, 0, column, column < time, channel, HEAD_DIM)
    store_states(kept_value, kept_strides, batch, head, begin, index, is_slot, channel, values, HEAD_DIM)
