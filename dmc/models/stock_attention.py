"""Attention of layers that keep their stock projections: those with a window, and all of stock models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dmc.compression import CompressedCache
from dmc.models.masked_attention import Documents, causal_attention, window_attention
from dmc.ranks import ALONE, Ranks, local_part

ATTENTION_NAME = "dmc_gates"
UNPADDED_ATTENTION = "dmc_unpadded"
"""Causal attention of stock models to sequences without padding, by documents where `documents` are given to `forward`.

Neither name has a mask function: for names that have one, transformers reads from the device in each forward whether
positions restart.
"""


def attend_unpadded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    context_ranks: Ranks = ALONE,
    documents: Documents | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    padding_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend causally, each rank with its heads of whole sequences where `context_ranks` divide them.

    Args:
        module: stock attention layer.
        query: rotated queries of this rank's tokens, [B, H_q, T, D].
        key: rotated keys, [B, H, T, D].
        value: values, [B, H, T, D].
        attention_mask: none.
        context_ranks: processes that divide each sequence.
        documents: those of whole sequences, as a compressed model sees them; None: a sequence is one.
        sliding_window: number of last tokens that a query sees, its own included; None: all.
        s_aux: attention sinks, [H_q]; None: there are none.
        padding_mask: True at real tokens, [B, T], in a layer with a window; None: no padding.
        options: of transformers' function.
    Returns:
        [B, T, H_q, D], and no weights.
    Raises:
        NotImplementedError: dropout within documents or windows.
    """
    query, key, value = (context_ranks.all_to_all(states, 1, 2) for states in (query, key, value))
    sinks = None if s_aux is None else context_ranks.chunk(local_part(s_aux), 0)
    hidden = None if padding_mask is None else ~padding_mask
    is_full = hidden is None and (sliding_window is None or sliding_window >= query.shape[2])
    if documents is None and is_full and sinks is None:
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return context_ranks.all_to_all(attended, 1, 2), None
    if options.get("dropout"):
        what = "documents, windows or sinks"
        raise NotImplementedError(f"attention_dropout={options['dropout']} with {what}: set it to 0")
    states, scaling = (query, key, value), options["scaling"]
    if is_full:
        attended = causal_attention(*states, scaling, documents, sinks)
    else:
        assert sliding_window is not None
        attended = window_attention(*states, scaling, sliding_window, hidden=hidden, documents=documents, sinks=sinks)
    return context_ranks.all_to_all(attended, 2, 1).transpose(1, 2), None


def attend_in_window(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    sliding_window: int | None = None,
    paged_cache: CompressedCache | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend in a compressed model's layers with a window, which have no gates and keep their stock projections.

    Args and returns are those of `attend_unpadded`, with the cache of `generate` or of the engine; None: the sequences
    are whole. There is no dropout, as in layers with gates.

    Raises:
        RuntimeError: another model has called it, in a layer without a window.
    """
    if sliding_window is None:
        raise RuntimeError(f"{ATTENTION_NAME} is the attention inside dmc's own layers and cannot serve another model")
    if paged_cache is None:
        return attend_unpadded(module, query, key, value, attention_mask, sliding_window=sliding_window, **options)
    index = int(module.layer_idx)  # type: ignore[arg-type]
    rest = options["scaling"], options.get("padding_mask"), options.get("s_aux")
    return attend_cached_window(paged_cache, index, (query, key, value), *rest).transpose(1, 2), None


@torch.compiler.disable
def attend_cached_window(
    cache: CompressedCache,
    layer_index: int,
    states: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    padding_mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend through a cache; no part of compiled layers, as `CompressedAttentionMixin.attend_cached`."""
    return cache.attend_plain(layer_index, *states, scaling, padding_mask, sinks)


def rotate_own_tokens(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook before a layer with a window: it rotates before ranks that divide sequences exchange heads, unlike gates."""
    if (ranks := kwargs.get("context_ranks", ALONE)).size == 1:
        return None
    tables = tuple(ranks.chunk(table, 1) for table in kwargs["position_embeddings"])
    return args, {**kwargs, "position_embeddings": tables}


AttentionInterface.register(ATTENTION_NAME, attend_in_window)
AttentionInterface.register(UNPADDED_ATTENTION, attend_unpadded)
