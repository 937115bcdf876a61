"""The RoPE rule of a compressed cache: entries are rotated after pooling, and the borrowed neuron stays removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def neuron_scale(head_dim: int, neuron_index: int | None, multiplier: float, like: Tensor) -> Tensor:
    """Return the vector [D] of ones with `multiplier` at the borrowed neuron, if there is one."""
    scale = torch.ones(head_dim, dtype=like.dtype, device=like.device)
    if neuron_index is not None:
        scale[neuron_index].fill_(multiplier)  # assigning a number would copy it from the CPU and wait
    return scale


def leader_scale(
    query_heads: int, head_dim: int, kv_heads: int, neuron_index: int, like: Tensor, multiplier: float = 0.0
) -> Tensor:
    """Return ones [H_q, D] with `multiplier` at a channel of each group's first head."""
    scale = torch.ones(query_heads, head_dim, dtype=like.dtype, device=like.device)
    scale[:: query_heads // kv_heads, neuron_index].fill_(multiplier)
    return scale


def full_attention_tables(
    rotary_emb: Any, like: Tensor, position_ids: Tensor, kind: str | None = "full_attention"
) -> tuple[Tensor, Tensor]:
    """Return a stock model's own cos and sin, [B, T, R] in the dtype of `like`, where they differ those of a kind."""
    kinds = (kind,) if hasattr(rotary_emb, f"{kind}_inv_freq") else ()
    if hasattr(rotary_emb, "mrope_section"):  # positions in time, height and width, the same for text
        position_ids = position_ids.expand(3, -1, -1)
    cos, sin = rotary_emb(like, position_ids, *kinds)
    return cos, sin


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their positions (half-split RoPE, as Llama's).

    RoPE mixes channel e* with its partner, so a removed neuron would fill again: pass `cos` and `sin` already
    multiplied by `neuron_scale` and the rotated channel is scaled too.

    Args:
        states: [B, heads, T, D].
        cos: [B or 1, T, D].
        sin: [B or 1, T, D].
    """
    first, second = states.chunk(2, dim=-1)
    half_turned = torch.cat((-second, first), dim=-1)
    return states * cos.unsqueeze(1) + half_turned * sin.unsqueeze(1)
