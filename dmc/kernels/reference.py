"""The reference backend: what every kernel must compute, written for reading. Other backends are tested against it.

Shapes beyond the legend of `dmc.compression.base`: S sequences of one call, n new tokens of each (1 while decoding), R
tokens of raw history, M blocks of a block table. Query head h uses KV head h // group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.compression import CompressionConfig, accumulate, rotate

QUERY_BLOCK = 128
"""Queries whose scores are held at once."""


@dataclass
class RawTokens:
    """Tokens before compression, in the order of their positions."""

    key: Tensor
    """Unrotated, without the borrowed neuron, [S, H, R + n, D]."""
    value: Tensor
    """[S, H, R + n, D]."""
    merged: Tensor
    """Thresholded decisions, bool [S, H, R + n]."""
    omega: Tensor
    """Importance, float32 [S, H, R + n]."""
    positions: Tensor
    """Position of each token in its sequence; negative: there is no such token, [S, R + n]."""
    cos: Tensor
    """RoPE tables at `positions`, borrowed neuron removed, [S, R + n, D]."""
    sin: Tensor

    def part(self, begin: int, end: int) -> RawTokens:
        """Tokens begin..end-1."""
        time = slice(begin, end)
        return RawTokens(
            self.key[:, :, time],
            self.value[:, :, time],
            self.merged[..., time],
            self.omega[..., time],
            self.positions[:, time],
            self.cos[:, time],
            self.sin[:, time],
        )


@dataclass
class StreamUpdate:
    """What the n tokens that enter the compressed stream do to it."""

    key: Tensor
    """Rotated stream state after each entering token, [S, H, n, D]."""
    value: Tensor
    """[S, H, n, D]."""
    slot: Tensor
    """Slot of the state, [S, H, n]."""
    written: Tensor
    """True where the state is the last of its slot in this call (else a later one overwrites it), [S, H, n]."""
    length: Tensor
    """Slots held after each entering token, [S, H, n]."""
    exists: Tensor
    """False for entering positions before the sequence's start, [S, n]."""
    mean: Tensor | None = None
    """Exact accumulation only: mean key and value of the open slot, unrotated float32 [S, H, 2 D]."""
    weight: Tensor | None = None
    """Exact accumulation only: total importance of the open slot, float32 [S, H]."""


def append_or_merge(
    tokens: RawTokens,
    num_new: int,
    lengths: Tensor,
    config: CompressionConfig,
    mean: Tensor | None = None,
    weight: Tensor | None = None,
) -> StreamUpdate:
    """Let the next `num_new` tokens enter the compressed stream: append, merge or drop (DMC, algorithm 1).

    With delay W the entering tokens are the ones W positions behind the new ones. A merge gate's state after each token
    is the windowed closed form of eq. 10 over the raw history; exact accumulation goes on from the open slot's mean.

    Args:
        tokens: history and new tokens.
        num_new: n.
        lengths: slots held so far, [S, H].
        config: the gate's action, delay and window.
        mean: open slot under exact accumulation, see `StreamUpdate`.
        weight: its total importance.
    """
    total = tokens.key.shape[2]
    end = total - config.delay
    entering = tokens.part(end - num_new, end)
    exists = entering.positions >= 0
    merged = entering.merged & (entering.positions > 0)[:, None]  # nothing precedes the first token
    appended = exists[:, None] & ~merged
    length = lengths[..., None] + appended.cumsum(-1)
    if config.action == "drop":
        key, value, written = entering.key, entering.value, appended
    else:
        past = tokens.part(0, end)
        key, value, mean, weight = _running_states(past, num_new, config.window_size, mean, weight)
        closes = torch.cat((appended[..., 1:], torch.ones_like(appended[..., :1])), dim=-1)
        written = exists[:, None] & closes
    return StreamUpdate(
        rotate(key, entering.cos, entering.sin).to(tokens.key.dtype),
        value.to(tokens.value.dtype),
        length - 1,
        written,
        length,
        exists,
        mean,
        weight,
    )


def _running_states(
    past: RawTokens, num_new: int, window_size: int | None, mean: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Pool unrotated keys and values up to each of the last `num_new` tokens; float32."""
    states = torch.cat((past.key, past.value), dim=-1).float()
    alpha = (past.merged & (past.positions > 0)[:, None]).float()
    omega = past.omega.where((past.positions >= 0)[:, None], 1.0)
    if window_size is None:
        assert mean is not None and weight is not None
        begin = states.shape[2] - num_new
        states = torch.cat((mean[:, :, None], states[:, :, begin:]), dim=2)
        alpha = torch.cat((torch.zeros_like(alpha[..., :1]), alpha[..., begin:]), dim=-1)
        omega = torch.cat((weight[..., None].where(weight[..., None] > 0, 1.0), omega[..., begin:]), dim=-1)
    pooled = accumulate(states, alpha, omega, window_size)[:, :, -num_new:]
    if window_size is None:
        in_open_slot = (
            torch.cat((alpha[..., 1:], torch.ones_like(alpha[..., :1])), dim=-1).flip(-1).cumprod(-1).flip(-1)
        )
        started = (past.positions[:, -1] >= 0)[:, None]
        weight = (in_open_slot * omega).sum(-1).where(started, 0.0)
        mean = pooled[:, :, -1].where(started[..., None], 0.0)
    key, value = pooled.chunk(2, dim=-1)
    return key, value, mean, weight


def write_slots(key_pages: Tensor, value_pages: Tensor, block_tables: Tensor, update: StreamUpdate) -> None:
    """Write the states that stay into their pages, in place.

    Args:
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: blocks of each head in order, [S, H, M]; must cover `update.length`.
        update: from `append_or_merge`.
    """
    block_size = key_pages.shape[1]
    sequence, head, token = update.written.nonzero(as_tuple=True)
    slot = update.slot[sequence, head, token]
    block = block_tables[sequence, head, slot // block_size].long()
    key_pages[block, slot % block_size] = update.key[sequence, head, token]
    value_pages[block, slot % block_size] = update.value[sequence, head, token]


def gather_pages(pages: Tensor, block_tables: Tensor, num_slots: int) -> Tensor:
    """Copy the first `num_slots` slots of each head out of their pages, [S, H, num_slots, D]."""
    num_blocks = -(-num_slots // pages.shape[1])
    return pages[block_tables[..., :num_blocks].long()].flatten(2, 3)[:, :, :num_slots]


def paged_attention(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, block_tables: Tensor, lengths: Tensor, scaling: float
) -> Tensor:
    """Attend from one query per sequence to the slots of its heads.

    Args:
        query: rotated, [B, H_q, D].
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: int32 [B, H, M].
        lengths: slots held, int32 [B, H]; a head without slots gives zeros.
        scaling: factor on the scores.
    Returns:
        [B, H_q, D].
    """
    visible = lengths[..., None].long()
    return prefill_attention(query[:, :, None], key_pages, value_pages, block_tables, visible, scaling)[:, :, 0]


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    visible: Tensor,
    scaling: float,
    *,
    top: StreamUpdate | None = None,
    recent_key: Tensor | None = None,
    recent_value: Tensor | None = None,
    recent_exists: Tensor | None = None,
) -> Tensor:
    """Attend from n queries per sequence to closed slots, to their own running state, and to raw recent tokens.

    Query i sees the first `visible[i]` slots, which no longer change; the state `top.key[i]` of the open slot as it was
    after the token that entered with query i; and the recent tokens i..i + W - 1 of `recent_key` (W = delay).

    Args:
        query: rotated, [S, H_q, n, D].
        key_pages: [N, block, D].
        value_pages: [N, block, D].
        block_tables: [S, H, M].
        visible: [S, H, n].
        scaling: factor on the scores.
        top: running states, where `exists`.
        recent_key: rotated raw tokens, [S, H, n + W - 1, D].
        recent_value: their values.
        recent_exists: [S, n + W - 1].
    Returns:
        [S, H_q, n, D]; zeros where a query sees nothing.
    """
    sequences, _, num_new, head_dim = query.shape
    kv_heads = block_tables.shape[1]
    num_slots = max(1, int(visible.max()))
    slot_key = gather_pages(key_pages, block_tables, num_slots).float()
    slot_value = gather_pages(value_pages, block_tables, num_slots).float()
    grouped = query.float().view(sequences, kv_heads, -1, num_new, head_dim) * scaling
    slots = torch.arange(num_slots, device=query.device)
    outputs = []
    for begin in range(0, num_new, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, num_new)
        rows = grouped[:, :, :, begin:end]  # [S, H, group, block, D]
        keys, values = [slot_key], [slot_value]
        seen = [slots < visible[:, :, begin:end, None]]  # [S, H, block, slots]
        if top is not None:
            keys.append(top.key[:, :, begin:end].float())
            values.append(top.value[:, :, begin:end].float())
            own = torch.eye(end - begin, dtype=torch.bool, device=query.device)
            seen.append((own & top.exists[:, begin:end, None])[:, None].expand(-1, kv_heads, -1, -1))
        if recent_key is not None and recent_value is not None and recent_exists is not None:
            delay = recent_key.shape[2] - num_new + 1
            recent = slice(begin, end + delay - 1)
            keys.append(recent_key[:, :, recent].float())
            values.append(recent_value[:, :, recent].float())
            offset = torch.arange(end - begin + delay - 1, device=query.device)
            offset = offset - torch.arange(end - begin, device=query.device)[:, None]
            band = (offset >= 0) & (offset < delay)
            seen.append((band & recent_exists[:, None, recent])[:, None].expand(-1, kv_heads, -1, -1))
        mask = torch.cat(seen, dim=-1)[:, :, None]  # [S, H, 1, block, keys]
        scores = rows @ torch.cat(keys, dim=2)[:, :, None].transpose(-1, -2)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        outputs.append(weights @ torch.cat(values, dim=2)[:, :, None])
    return torch.cat(outputs, dim=3).view(query.shape).to(query.dtype)
