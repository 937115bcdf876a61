"""Attention of prompts in layers that see the last tokens alone, as torch's own attention to the band of each query."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dmc.kernels.base import LayerCache, NewTokens
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.pages import gather_slots
from dmc.kernels.probabilities import QUERY_BLOCK

LARGEST_BLOCK = 1024
"""Most queries whose mask is made at once."""


def window_attention(
    query: Tensor, cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, window: int, scaling: float
) -> Tensor:
    """Attend from new tokens to the last `window` tokens of their sequences, themselves included.

    Args:
        query: rotated, [T, H_q, D].
        cache: the layer before the new tokens are written; the position p is in slot p % window.
        batch: the batch of the tokens, known on the host.
        tokens: the new ones, rotated, as the pages will hold them.
        window: tokens that a query sees.
        scaling: factor on the scores.
    Returns:
        [T, H_q, D].
    """
    attended, sinks = torch.empty_like(query), cache.sinks
    for i, (span, begin) in enumerate(zip(batch.spans, batch.begins, strict=True)):
        num_held, new = min(begin, window - 1), span.stop - span.start
        slots = torch.arange(begin - num_held, begin, device=query.device)[None, None] % window
        tables = cache.block_tables[batch.row_index[i : i + 1]]
        key, value = (
            torch.cat((_read(pages, scales, tables, slots).to(states.dtype), states[span].transpose(0, 1)[None]), dim=2)
            for pages, scales, states in (
                (cache.key_pages, cache.key_scales, tokens.key),
                (cache.value_pages, cache.value_scales, tokens.value),
            )
        )
        block = min(max(window, QUERY_BLOCK), LARGEST_BLOCK)
        for first in range(0, new, block):
            last = min(first + block, new)
            begin_key, end_key = max(0, num_held + first + 1 - window), num_held + last
            at = torch.arange(num_held + first, num_held + last, device=query.device)[:, None]
            keys_at = torch.arange(begin_key, end_key, device=query.device)
            mask = (keys_at <= at) & (keys_at > at - window)
            keys, values = key[:, :, begin_key:end_key], value[:, :, begin_key:end_key]
            if sinks is not None:  # a key of zeros more, whose bias is the sink, and a value of zeros
                keys, values = pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1))
                bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
                column = sinks.to(query.dtype).view(-1, 1, 1).expand(-1, len(bias), 1)
                mask = torch.cat((bias.expand(len(column), -1, -1), column), dim=-1)[None]
            asked = query[span][first:last].transpose(0, 1)[None]
            out = scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
            attended[span.start + first : span.start + last] = out[0].transpose(0, 1)
    return attended


def _read(pages: Tensor, scales: Tensor | None, tables: Tensor, slots: Tensor) -> Tensor:
    """Copy slots out of pages, times their scales, [1, H, K, D]."""
    read = gather_slots(pages, tables, slots)
    return read if scales is None else read * gather_slots(scales, tables, slots)
