"""Layers without attention, in training and in compressed models: documents apart, states in the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dmc.compression import CompressedCache
from dmc.models.masked_attention import Documents

RECURRENT_NAME = "linear_attn"
"""Name of such a layer's part in place of `self_attn`."""


def attention_layers(model: Any) -> list[Any]:
    """Return the attention of the layers of a causal LM that have any."""
    return [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]


def install_recurrent(model: Any) -> None:
    """Let layers without attention, if a causal LM has any, run by `forward_recurrent`; may be called twice."""
    for layer in model.model.layers:
        if (recurrent := getattr(layer, RECURRENT_NAME, None)) is not None:
            recurrent.forward = functools.partial(forward_recurrent, recurrent)


def forward_recurrent(
    layer: nn.Module,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    padding_mask: Tensor | None = None,
    paged_cache: CompressedCache | None = None,
    documents: Documents | None = None,
    **_: Any,
) -> Tensor:
    """Run the stock forward of a layer without attention.

    Transformers has no varying lengths outside of kernels for GPUs, so that documents run one after the other.

    Args:
        layer: the layer.
        hidden_states: its input, [B, T, hidden].
        cache_params: transformers' cache, of a stock model.
        attention_mask: of a stock model: 1 at real tokens, [B, T]; None: no padding.
        padding_mask: True at real tokens, [B, past + T]; None: no padding.
        paged_cache: cache of `generate` or of the engine, which keeps the states; None: the sequences are whole.
        documents: states restart at each; None: a sequence is one.
    Returns:
        [B, T, hidden].
    """
    run: Callable[..., Tensor] = functools.partial(type(layer).forward, layer)
    if paged_cache is not None:
        return _run_cached(paged_cache, layer, run, hidden_states, padding_mask)
    if padding_mask is not None:
        hidden_states = hidden_states * padding_mask[..., None].to(hidden_states.dtype)
    if documents is None:
        return run(hidden_states, cache_params=cache_params, attention_mask=attention_mask)
    return torch.stack(
        [
            torch.cat([run(row[None, first:end])[0] for first, end in bounds])
            for row, bounds in zip(hidden_states, documents.bounds, strict=True)
        ]
    )


@torch.compiler.disable
def _run_cached(
    cache: CompressedCache, layer: Any, run: Callable[..., Tensor], hidden_states: Tensor, padding_mask: Tensor | None
) -> Tensor:
    """Run from the states in a cache; no part of compiled layers, as `CompressedAttentionMixin.attend_cached`."""
    index = int(layer.layer_idx)
    return cache.run_recurrent(index, lambda states, kept: run(states, cache_params=kept), hidden_states, padding_mask)
