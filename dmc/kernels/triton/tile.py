"""Slots in pages, and the online softmax that decode and prefill share, in powers of two and float32."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""Factor that turns exp into exp2."""

STAGES = 5
"""Of a loop over tiles: two for a table's entries, two for what they point to, so that two tiles have a buffer each,
and one to compute."""


def tile_keys(row_bytes: int, most_bytes: int) -> int:
    """Keys of one tile, of at most so many bytes; but 16 at least, as `tl.dot` demands."""
    return max(16, min(128, most_bytes // row_bytes))


def tile_warps(row_bytes: int) -> int:
    """Warps of a program: twice as many where a tile's operands would spill from the registers of four."""
    return 4 if row_bytes <= 256 else 8


@triton.jit
def attend_tile(query, key, value, visible, scaling, peak, total, acc, key_scales, value_scales, bias, place, held):
    """Update (peak, total, acc) of the queries [rows] with a tile of keys; also return its scores [rows, keys].

    Factors of 8-bit keys and values, or None, lie at `place` [keys] where `held`; they meet the scores and the weights.
    So does what is added to the scores, or None.
    """
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scaling
    if key_scales is not None:
        scores *= tl.load(key_scales + place, mask=held, other=0.0)[None, :]
    if bias is not None:
        scores += tl.load(bias + place, mask=held, other=0.0)[None, :] * 1.4426950408889634
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf while nothing is visible
    weight = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weight, 1)
    if value_scales is not None:
        weight *= tl.load(value_scales + place, mask=held, other=0.0)[None, :]
    acc = acc * fade[:, None] + tl.dot(weight.to(query.dtype), value.to(query.dtype), input_precision="ieee")
    return scores, new_peak, total, acc


@triton.jit
def start_from_sinks(sinks, query_head, held):
    """Return the peak and the total of query heads [rows] that have seen their sinks alone, where `held`."""
    sink = tl.load(sinks + query_head, mask=held, other=float("-inf")).to(tl.float32)
    return sink * 1.4426950408889634, tl.where(held, 1.0, 0.0)


@triton.jit
def attend_own(query, key, value, visible, scaling, peak, total, acc):
    """Update as `attend_tile` does, with query i attending to key i alone."""
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scaling
    score = tl.where(visible, score, float("-inf"))
    new_peak = tl.maximum(peak, score)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score - base)
    fade = tl.exp2(peak - base)
    return new_peak, total * fade + weight, acc * fade[:, None] + weight[:, None] * value.to(tl.float32)


@triton.jit
def places(table, slot, held, BLOCK_SIZE: tl.constexpr):
    """Find slots [keys] of one head in the pages through its block table."""
    return tl.load(table + slot // BLOCK_SIZE, mask=held, other=0).to(tl.int64) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def load_rows(states, place, held, channel, HEAD_DIM: tl.constexpr):
    """Load the channels at `place` [rows], 0 where not `held`."""
    return tl.load(
        states + place[:, None] + channel[None, :], mask=held[:, None] & (channel < HEAD_DIM)[None, :], other=0.0
    )
