"""Attention probabilities over paged keys, one block of queries at a time, for policies during prefill."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.pages import gather_pages, slots_below

QUERY_BLOCK = 128
"""Number of queries whose scores are held at once."""


def attention_probabilities(
    query: Tensor, cache: LayerCache, rows: Tensor, slots: Tensor, scaling: float, num_slots: int | None = None
) -> Iterator[Tensor]:
    """Compute softmax(q k^T) for at most `QUERY_BLOCK` queries at a time, without an [n, n] tensor.

    See `attention_scores`; 0 where a slot is not seen.
    """
    for scores in attention_scores(query, cache, rows, slots, scaling, num_slots):
        yield softmax_with_sinks(scores, cache.sinks)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Take the softmax of scores, [S, H, group, queries, keys], over the keys and the sink of each head, if any.

    Args:
        scores: float32.
        sinks: of `LayerCache`, [H group].
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def attention_scores(
    query: Tensor, cache: LayerCache, rows: Tensor, slots: Tensor, scaling: float, num_slots: int | None = None
) -> Iterator[Tensor]:
    """Compute q k^T for at most `QUERY_BLOCK` queries at a time.

    Args:
        query: rotated, [S, H_q, n, D].
        cache: layer with the keys.
        rows: cache row of each sequence, int64 [S].
        slots: query i sees the first `slots[..., i]` slots; [S, H, n], does not fall along n.
        scaling: factor on the scores.
        num_slots: a bound on `slots`, with which nothing is read back from the device; None: the bound of each block.
    Yields:
        float32 [S, H, group, queries of the block, slots], -inf where a slot is not seen.
    """
    sequences, _, num_new, head_dim = query.shape
    tables = cache.block_tables[rows]
    key = gather_pages(cache.key_pages, tables, num_slots or int(slots.max()), cache.key_scales).float()
    grouped = query.float().reshape(sequences, key.shape[1], -1, num_new, head_dim) * scaling
    place = torch.arange(key.shape[2], device=query.device)
    for begin in range(0, num_new, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, num_new)
        seen = slots[:, :, begin:end]
        width = num_slots or int(seen.max())
        block = grouped[:, :, :, begin:end]
        scores = (block.flatten(2, 3) @ key[:, :, :width].transpose(-1, -2)).view(*block.shape[:-1], width)
        hidden = place[:width] >= seen[:, :, None, :, None]
        yield scores.masked_fill_(hidden, -torch.inf)


def attention_received(
    query: Tensor, cache: LayerCache, batch: ForwardBatch, slots: Tensor, scaling: float, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum the attention that slots receive from all queries, without an [n, n] tensor; a backend may be faster.

    Args:
        query: rotated, [T, H_q, D].
        cache: layer with the keys.
        batch: the batch of the queries.
        slots: query i sees the first `slots[i]` slots, at least one; int32 [T, H], does not fall within a sequence.
        scaling: factor on the scores.
        lse: of `prefill_attention` from the same queries to the same slots alone, float32 [T, H_q].
    Returns:
        Over N slots, those of the longest head at least: the attention by query head, float32 [S, H, group, N], and
        the square of its mean over the group, [S, H, N].
    """
    sequences, heads, most = len(batch.rows), slots.shape[1], int(slots.max())
    columns = query.new_zeros(sequences, heads, query.shape[1] // heads, most, dtype=torch.float32)
    squares = torch.zeros_like(columns[:, :, 0])
    padded, seen, sums = (batch.pad(numbers).transpose(1, 2) for numbers in (query, slots, lse))
    sums = sums.unflatten(1, (heads, -1))[..., None].split(QUERY_BLOCK, dim=3)  # [S, H, group, block, 1]
    blocks = attention_scores(padded, cache, batch.row_index, seen, scaling, most)
    for scores, limits, log_sum in zip(blocks, seen.split(QUERY_BLOCK, dim=2), sums, strict=True):
        is_seen = slots_below(limits, most)[:, :, None]
        weights = (scores - log_sum).exp().where(is_seen, 0)  # a NaN reaches only the slots it sees
        columns += weights.sum(3)
        squares += weights.mean(2).square().sum(2)
    return columns, squares
