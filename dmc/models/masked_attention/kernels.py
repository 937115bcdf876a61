"""Triton kernels of masked attention: FlashAttention with a bias per key, of the stream and of a window of raw keys.

Row i sees key j of a range where lag <= i - j < window and j lies in i's document; its bias counts where i - j >= near.
Each range of a block of rows (or keys) is walked in two loops: blocks all of whose scores count alike need no mask, the
others do, and what no row of the block sees is left out. Scores are in powers of two; sums are float32.
Where keys that add nothing are left out, those kept are a range of their own, gathered: `places` tells where each was,
`time` behind the last, and `counts` how many there are before each place. The stream then has the keys without a bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    bias,
    recent_key,
    recent_value,
    kept_key,
    kept_value,
    places,
    counts,
    hidden,
    first,
    out,
    log_sum_exp,
    query_strides,
    key_strides,
    value_strides,
    recent_key_strides,
    recent_value_strides,
    kept_key_strides,
    kept_value_strides,
    out_strides,
    time,
    scaling,
    lag,
    window,
    near,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from one block of rows of one query head; the last rows see most keys, so they start first."""
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // (KV_HEADS * GROUP), pair % (KV_HEADS * GROUP)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    row, channel = begin + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    exists = row < time
    rows = load_states(query, query_strides, batch, head, begin, row - begin, exists, channel, HEAD_DIM)
    of_document = None
    if first is not None:
        of_document = tl.load(first + batch * time + row, mask=exists, other=time)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    kv_head = head // GROUP
    if recent_key is not None:
        peak, total, acc = attend_range(
            rows, recent_key, recent_value, None, None, None, hidden, first, of_document, recent_key_strides,
            recent_value_strides, batch, kv_head, begin, time, scaling, 0, lag, 0, peak, total, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if kept_key is not None:
        peak, total, acc = attend_range(
            rows, kept_key, kept_value, bias, places, counts, None, first, of_document, kept_key_strides,
            kept_value_strides, batch, kv_head, begin, time, scaling, near, None, near, peak, total, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        peak, total, acc = attend_range(
            rows, key, value, None, None, None, hidden, first, of_document, key_strides,
            value_strides, batch, kv_head, begin, time, scaling, lag, near, lag, peak, total, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    else:
        peak, total, acc = attend_range(
            rows, key, value, bias, None, None, hidden, first, of_document, key_strides,
            value_strides, batch, kv_head, begin, time, scaling, lag, window, near, peak, total, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    acc /= tl.where(total > 0, total, 1.0)[:, None]
    # With +inf the backward gives a row that sees nothing no weight.
    tl.store(log_sum_exp + pair * time + row, tl.where(total > 0, peak + tl.log2(total), float("inf")), mask=exists)
    store_states(out, out_strides, batch, head, begin, row - begin, exists, channel, acc, HEAD_DIM)


@triton.jit
def attend_range(
    rows, key, value, bias, places, counts, hidden, first, of_document, key_strides, value_strides,
    batch, kv_head, begin, time, scaling, lag, window, near, peak, total, acc,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the online softmax (peak, total, acc) of a block of rows with one range of keys."""
    start, full_start, full_stop, stop = key_blocks(
        first, counts, batch, kv_head, begin, time, lag, window, near, KV_HEADS, ROWS, KEYS
    )
    for index in tl.range(0, full_start - start + stop - full_stop, num_stages=1):
        block = start + index
        block = tl.where(block < full_start, block, block - full_start + full_stop)
        peak, total, acc = attend_block(
            rows, key, value, bias, places, hidden, of_document, key_strides, value_strides,
            batch, kv_head, begin, block * KEYS, time, scaling, lag, window, near, peak, total, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION, True,
        )  # fmt: skip
    for block in tl.range(full_start, full_stop):
        peak, total, acc = attend_block(
            rows, key, value, bias, places, hidden, of_document, key_strides, value_strides,
            batch, kv_head, begin, block * KEYS, time, scaling, lag, window, near, peak, total, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION, False,
        )  # fmt: skip
    return peak, total, acc


@triton.jit
def attend_block(
    rows, key, value, bias, places, hidden, of_document, key_strides, value_strides,
    batch, kv_head, begin, place, time, scaling, lag, window, near, peak, total, acc,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the online softmax (peak, total, acc) of a block of rows with the keys from `place` on."""
    index, channel = tl.arange(0, KEYS), tl.arange(0, CHANNELS)
    slot, exists = place + index, None
    if MASKED:
        exists = slot < time
    column = slot
    if MASKED and places is not None:
        column = load_numbers(places + (batch * KV_HEADS + kv_head) * time + slot, exists, time)
    keys = load_states(key, key_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
    scores = tl.dot(rows, tl.trans(keys), input_precision=PRECISION) * scaling
    distance = (begin + tl.arange(0, ROWS))[:, None] - column[None, :]
    of_key, hides = None, None
    if bias is not None:
        of_key = load_biases(bias, batch, kv_head, slot, exists, time, KV_HEADS)[None, :]
    if hidden is not None:
        hides = load_hidden(hidden, batch, column, exists, time)[None, :]
    if of_document is not None:
        of_document = of_document[:, None]
    scores = masked(scores, distance, column[None, :], of_document, of_key, hides, lag, window, near, MASKED)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf while nothing is visible
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    values = load_states(value, value_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_peak, total * fade + tl.sum(weights, 1), acc


@triton.jit
def query_gradient_kernel(
    query,
    key,
    value,
    bias,
    recent_key,
    recent_value,
    kept_key,
    kept_value,
    places,
    counts,
    hidden,
    first,
    out,
    grad,
    log_sum_exp,
    delta,
    query_grad,
    query_strides,
    key_strides,
    value_strides,
    recent_key_strides,
    recent_value_strides,
    kept_key_strides,
    kept_value_strides,
    out_strides,
    grad_strides,
    query_grad_strides,
    time,
    scaling,
    lag,
    window,
    near,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient of one block of queries; also store delta, output . gradient of each row."""
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // (KV_HEADS * GROUP), pair % (KV_HEADS * GROUP)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    index, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    row = begin + index
    exists = row < time
    outs = load_states(out, out_strides, batch, head, begin, index, exists, channel, HEAD_DIM)
    grads = load_states(grad, grad_strides, batch, head, begin, index, exists, channel, HEAD_DIM)
    deltas = tl.sum(outs.to(tl.float32) * grads.to(tl.float32), 1)
    tl.store(delta + pair * time + row, deltas, mask=exists)
    rows = load_states(query, query_strides, batch, head, begin, index, exists, channel, HEAD_DIM)
    of_rows = tl.load(log_sum_exp + pair * time + row, mask=exists, other=float("inf"))
    of_document = None
    if first is not None:
        of_document = tl.load(first + batch * time + row, mask=exists, other=time)
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    kv_head = head // GROUP
    if recent_key is not None:
        acc = query_gradient_of_range(
            rows, grads, of_rows, deltas, recent_key, recent_value, None, None, None, hidden, first, of_document,
            recent_key_strides, recent_value_strides, batch, kv_head, begin, time, scaling, 0, lag, 0, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    if kept_key is not None:
        acc = query_gradient_of_range(
            rows, grads, of_rows, deltas, kept_key, kept_value, bias, places, counts, None, first, of_document,
            kept_key_strides, kept_value_strides, batch, kv_head, begin, time, scaling, near, None, near, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        acc = query_gradient_of_range(
            rows, grads, of_rows, deltas, key, value, None, None, None, hidden, first, of_document,
            key_strides, value_strides, batch, kv_head, begin, time, scaling, lag, near, lag, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    else:
        acc = query_gradient_of_range(
            rows, grads, of_rows, deltas, key, value, bias, None, None, hidden, first, of_document,
            key_strides, value_strides, batch, kv_head, begin, time, scaling, lag, window, near, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION,
        )  # fmt: skip
    acc *= scaling / LOG2_E
    store_states(query_grad, query_grad_strides, batch, head, begin, index, exists, channel, acc, HEAD_DIM)


@triton.jit
def query_gradient_of_range(
    rows, grads, of_rows, deltas, key, value, bias, places, counts, hidden, first, of_document, key_strides,
    value_strides, batch, kv_head, begin, time, scaling, lag, window, near, acc,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `acc` the gradient of a block of queries by one range of keys."""
    start, full_start, full_stop, stop = key_blocks(
        first, counts, batch, kv_head, begin, time, lag, window, near, KV_HEADS, ROWS, KEYS
    )
    for index in tl.range(0, full_start - start + stop - full_stop, num_stages=1):
        block = start + index
        block = tl.where(block < full_start, block, block - full_start + full_stop)
        acc = query_gradient_of_block(
            rows, grads, of_rows, deltas, key, value, bias, places, hidden, of_document, key_strides, value_strides,
            batch, kv_head, begin, block * KEYS, time, scaling, lag, window, near, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION, True,
        )  # fmt: skip
    for block in tl.range(full_start, full_stop):
        acc = query_gradient_of_block(
            rows, grads, of_rows, deltas, key, value, bias, places, hidden, of_document, key_strides, value_strides,
            batch, kv_head, begin, block * KEYS, time, scaling, lag, window, near, acc,
            KV_HEADS, HEAD_DIM, CHANNELS, ROWS, KEYS, PRECISION, False,
        )  # fmt: skip
    return acc


@triton.jit
def query_gradient_of_block(
    rows, grads, of_rows, deltas, key, value, bias, places, hidden, of_document, key_strides, value_strides,
    batch, kv_head, begin, place, time, scaling, lag, window, near, acc,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to `acc` the gradient of a block of queries by the keys from `place` on."""
    index, channel = tl.arange(0, KEYS), tl.arange(0, CHANNELS)
    slot, exists = place + index, None
    if MASKED:
        exists = slot < time
    column = slot
    if MASKED and places is not None:
        column = load_numbers(places + (batch * KV_HEADS + kv_head) * time + slot, exists, time)
    keys = load_states(key, key_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
    scores = tl.dot(rows, tl.trans(keys), input_precision=PRECISION) * scaling
    distance = (begin + tl.arange(0, ROWS))[:, None] - column[None, :]
    of_key, hides = None, None
    if bias is not None:
        of_key = load_biases(bias, batch, kv_head, slot, exists, time, KV_HEADS)[None, :]
    if hidden is not None:
        hides = load_hidden(hidden, batch, column, exists, time)[None, :]
    if of_document is not None:
        of_document = of_document[:, None]
    scores = masked(scores, distance, column[None, :], of_document, of_key, hides, lag, window, near, MASKED)
    weights = tl.exp2(scores - of_rows[:, None])
    values = load_states(value, value_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
    by_weight = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
    by_score = weights * (by_weight - deltas[:, None])
    return tl.dot(by_score.to(keys.dtype), keys, acc, input_precision=PRECISION)


@triton.jit
def key_gradient_kernel(
    query,
    key,
    value,
    bias,
    places,
    hidden,
    first,
    end,
    grad,
    log_sum_exp,
    delta,
    key_grad,
    value_grad,
    bias_grad,
    query_strides,
    key_strides,
    value_strides,
    grad_strides,
    key_grad_strides,
    value_grad_strides,
    time,
    scaling,
    lag,
    window,
    near,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of one block of keys of one range, their values and biases, by all rows that see them.

    Those of kept keys are added to what is stored at the keys' places, each of which one program has.
    """
    pair = tl.program_id(1).to(tl.int64)
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    place = tl.program_id(0) * KEYS
    index, channel = tl.arange(0, KEYS), tl.arange(0, CHANNELS)
    column = place + index
    exists = column < time
    lowest, highest = place, place + KEYS - 1
    if places is not None:
        column = tl.load(places + pair * time + column, mask=exists, other=time)
        lowest, highest = tl.min(column, 0), tl.max(tl.where(column < time, column, 0), 0)
    keys = load_states(key, key_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
    values = load_states(value, value_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
    of_key, hides = None, None
    if bias is not None:
        of_key = load_biases(bias, batch, kv_head, place + index, exists, time, KV_HEADS)[:, None]
    if hidden is not None:
        hides = load_hidden(hidden, batch, column, exists, time)[:, None]
    by_key = tl.zeros((KEYS, CHANNELS), tl.float32)
    by_value = tl.zeros((KEYS, CHANNELS), tl.float32)
    by_bias = tl.zeros((KEYS,), tl.float32)
    start, full_start, full_stop, stop = row_blocks(end, batch, lowest, highest, time, lag, window, near, ROWS)
    num_masked, num_full = full_start - start + stop - full_stop, full_stop - full_start
    for step in tl.range(0, num_masked * GROUP, num_stages=1):
        block = start + step % num_masked
        block = tl.where(block < full_start, block, block - full_start + full_stop)
        by_key, by_value, by_bias = key_gradient_of_block(
            query, keys, values, of_key, hides, first, grad, log_sum_exp, delta, query_strides, grad_strides,
            batch, kv_head * GROUP + step // num_masked, block * ROWS, column, time, scaling, lag, window, near,
            by_key, by_value, by_bias, KV_HEADS * GROUP, HEAD_DIM, CHANNELS, ROWS, PRECISION, True,
        )  # fmt: skip
    for step in tl.range(0, num_full * GROUP):
        by_key, by_value, by_bias = key_gradient_of_block(
            query, keys, values, of_key, hides, first, grad, log_sum_exp, delta, query_strides, grad_strides,
            batch, kv_head * GROUP + step // num_full, (full_start + step % num_full) * ROWS, column, time, scaling,
            lag, window, near, by_key, by_value, by_bias,
            KV_HEADS * GROUP, HEAD_DIM, CHANNELS, ROWS, PRECISION, False,
        )  # fmt: skip
    by_key *= scaling / LOG2_E
    if places is not None:
        place, index, exists = 0, column, column < time
        by_key += load_states(key_grad, key_grad_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
        by_value += load_states(value_grad, value_grad_strides, batch, kv_head, place, index, exists, channel, HEAD_DIM)
    store_states(key_grad, key_grad_strides, batch, kv_head, place, index, exists, channel, by_key, HEAD_DIM)
    store_states(value_grad, value_grad_strides, batch, kv_head, place, index, exists, channel, by_value, HEAD_DIM)
    if bias_grad is not None:
        tl.store(bias_grad + pair * time + column, by_bias, mask=exists)


@triton.jit
def key_gradient_of_block(
    query, keys, values, of_key, hides, first, grad, log_sum_exp, delta, query_strides, grad_strides,
    batch, head, begin, column, time, scaling, lag, window, near, by_key, by_value, by_bias,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of keys by one query head's rows from `begin` on; scores are [keys, rows]."""
    index, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    row, exists = begin + index, None
    if MASKED:
        exists = row < time
    rows = load_states(query, query_strides, batch, head, begin, index, exists, channel, HEAD_DIM)
    scores = tl.dot(keys, tl.trans(rows), input_precision=PRECISION) * scaling
    distance = row[None, :] - column[:, None]
    of_document = None
    if MASKED and first is not None:
        of_document = tl.load(first + batch * time + row, mask=exists, other=time)[None, :]
    scores = masked(scores, distance, column[:, None], of_document, of_key, hides, lag, window, near, MASKED)
    place = (batch * HEADS + head) * time + row
    of_rows = load_numbers(log_sum_exp + place, exists, float("inf"))
    weights = tl.exp2(scores - of_rows[None, :])
    grads = load_states(grad, grad_strides, batch, head, begin, index, exists, channel, HEAD_DIM)
    by_value = tl.dot(weights.to(grads.dtype), grads, by_value, input_precision=PRECISION)
    by_weight = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
    deltas = load_numbers(delta + place, exists, 0.0)
    by_score = weights * (by_weight - deltas[None, :])
    by_key = tl.dot(by_score.to(rows.dtype), rows, by_key, input_precision=PRECISION)
    if of_key is not None:
        if MASKED:
            by_score = tl.where(distance >= near, by_score, 0.0)
        by_bias += tl.sum(by_score, 1)
    return by_key, by_value, by_bias


@triton.jit
def masked(scores, distance, column, of_document, bias, hides, lag, window, near, MASKED: tl.constexpr):
    """Add the biases to the scores that have one, and let all that is not visible be -inf; all broadcast."""
    if bias is not None:
        if MASKED:
            scores += tl.where(distance >= near, bias, 0.0)
        else:
            scores += bias
    if MASKED:
        visible = distance >= lag
        if window is not None:
            visible = visible & (distance < window)
        if of_document is not None:
            visible = visible & (column >= of_document)
        scores = tl.where(visible, scores, float("-inf"))
    if hides is not None:
        scores = tl.where(hides, float("-inf"), scores)
    return scores


@triton.jit
def key_blocks(
    first, counts, batch, kv_head, begin, time, lag, window, near,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Find the blocks of keys that a block of rows sees, see `blocks_of`."""
    start, full_start = 0, 0
    if first is not None:
        start = tl.load(first + batch * time + begin)
        full_start = tl.load(first + batch * time + tl.minimum(begin + ROWS, time) - 1)
    if window is not None:
        start = tl.maximum(start, begin - window + 1)
        full_start = tl.maximum(full_start, begin + ROWS - window)
    full_stop, stop = begin - near + 1, tl.minimum(begin + ROWS, time) - lag
    if counts is not None:
        counts += (batch * KV_HEADS + kv_head) * (time + 1)
        start, full_start = tl.load(counts + start), tl.load(counts + full_start)
        full_stop, stop = tl.load(counts + tl.maximum(full_stop, 0)), tl.load(counts + tl.maximum(stop, 0))
    return blocks_of(start, full_start, full_stop, stop, KEYS)


@triton.jit
def row_blocks(end, batch, lowest, highest, time, lag, window, near, ROWS: tl.constexpr):
    """Find the blocks of rows that see a block of keys between two places, see `blocks_of`."""
    stop, full_stop = time, time
    if end is not None:
        stop = tl.load(end + batch * time + tl.minimum(highest, time - 1))
        full_stop = tl.load(end + batch * time + tl.minimum(lowest, time - 1))
    if window is not None:
        stop = tl.minimum(stop, highest + window)
        full_stop = tl.minimum(full_stop, lowest + window)
    stop = tl.where(lowest < time, stop, 0)
    return blocks_of(lowest + lag, highest + near, full_stop, stop, ROWS)


@triton.jit
def blocks_of(start, full_start, full_stop, stop, SIZE: tl.constexpr):
    """Return places in blocks: where they start, between which ones nothing needs a mask, and where they stop."""
    start = tl.maximum(start, 0) // SIZE
    stop = tl.maximum((stop + SIZE - 1) // SIZE, start)
    full_start = tl.minimum(tl.maximum((full_start + SIZE - 1) // SIZE, start), stop)
    full_stop = tl.minimum(tl.maximum(full_stop // SIZE, full_start), stop)
    return start, full_start, full_stop, stop


@triton.jit
def load_biases(bias, batch, kv_head, column, exists, time, KV_HEADS: tl.constexpr):
    """Load the keys' biases, in powers of two."""
    return load_numbers(bias + (batch * KV_HEADS + kv_head) * time + column, exists, 0.0) * LOG2_E


@triton.jit
def load_hidden(hidden, batch, column, exists, time):
    """Load whether keys are hidden."""
    return load_numbers(hidden + batch * time + column, exists, 0) != 0


@triton.jit
def load_numbers(places, exists, other: tl.constexpr):
    """Load one number for each token, `other` where it does not exist; exists=None: all do."""
    return tl.load(places) if exists is None else tl.load(places, mask=exists, other=other)


@triton.jit
def load_states(states, strides, batch, head, begin, index, exists, channel, HEAD_DIM: tl.constexpr):
    """Load [tokens, channels] of one head, tokens begin + index, 0 where they do not exist; exists=None: all do."""
    origin = states + batch * strides[0] + head * strides[1] + tl.cast(begin, tl.int64) * strides[2]
    places = origin + index[:, None] * strides[2] + channel[None, :]
    if exists is not None:
        found = tl.load(places, mask=exists[:, None] & (channel < HEAD_DIM)[None, :], other=0.0)
    elif channel.shape[0] == HEAD_DIM:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=(channel < HEAD_DIM)[None, :], other=0.0)
    return found


@triton.jit
def store_states(states, strides, batch, head, begin, index, exists, channel, values, HEAD_DIM: tl.constexpr):
    """Store what `load_states` loads."""
    origin = states + batch * strides[0] + head * strides[1] + tl.cast(begin, tl.int64) * strides[2]
    mask = exists[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(origin + index[:, None] * strides[2] + channel[None, :], values.to(states.dtype.element_ty), mask=mask)
