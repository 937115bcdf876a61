"""What gates and scorers learn from attention: that of a repetition of the text, and that of later queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmc.compression import rotate
from dmc.kernels.probabilities import QUERY_BLOCK


def rotated_states(
    attention: Any, states: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project the input of a compressed model's attention, and rotate.

    Args:
        attention: attention module of the layer.
        states: its input, [B, T, hidden].
        rotary: the family's cos and sin, [B or 1, T, R].
    Returns:
        Float32 queries by group [B, H, group, T, D], keys and values [B, H, T, D]; and the keys before RoPE, times what
        RoPE scales them by, as turning cached keys back gives them.
    """
    rotary, places = attention.rotation.whole(rotary), torch.arange(states.shape[1], device=states.device)[None]
    query, key, value, _ = attention.project(states, rotary[0].shape[-1], positions=places)
    query, key, value = query.float(), key.float(), value.float()
    cos, sin = attention.rotary_tables(rotary, torch.float32)
    rotated, scale = attention.rotate_query(query, cos, sin), (cos.square() + sin.square()).sqrt()[:, None]
    return rotated.unflatten(1, (key.shape[1], -1)), rotate(key, cos, sin), value, key * scale


def future_attention(grouped: Tensor, key: Tensor, scaling: float, window: int) -> Tensor:
    """Average the attention that each token receives from the queries that come once it has left the window.

        y_t = mean over the group and queries i > t + W of softmax_j(q_i^T k_j / sqrt(d))[t]

    The target of KVpop (arXiv:2607.05061), exact and block by block of queries; that it is a mean over all later
    queries is our reading of its abstract.

    Args:
        grouped: rotated queries, [B, H, group, T, D].
        key: rotated keys, [B, H, T, D].
        scaling: factor on the scores.
        window: W, below T - 1.
    Returns:
        [B, H, T - W - 1], of the tokens that leave the window before the last query.
    """
    length = key.shape[2]
    places = torch.arange(length, device=key.device)
    received = torch.zeros_like(key[..., 0])
    for begin in range(0, length, QUERY_BLOCK):
        rows = slice(begin, begin + QUERY_BLOCK)
        scores = grouped[..., rows, :] @ key[:, :, None, : begin + QUERY_BLOCK].mT * scaling
        ahead = places[: begin + QUERY_BLOCK] - places[rows, None]
        shares = scores.masked_fill_(ahead > 0, -torch.inf).softmax(-1).masked_fill_(ahead >= -window, 0.0)
        received[..., : begin + QUERY_BLOCK] += shares.mean(2).sum(2)
    leaving = length - window - 1
    return received[..., :leaving] / (leaving - places[:leaving])


def second_pass_scores(attention: Any, states: Tensor, rotary: tuple[Tensor, Tensor], residual: Tensor) -> Tensor:
    """Score tokens of the first half of a text by the attention of its second half, which repeats it (KVzip+).

        s_i = max over the group and queries j of softmax_i(q_j^T k_i / sqrt(d)) * ||W_o v_i|| / ||h_j||

    after KVzap (arXiv:2601.07891), h_j the residual stream before the layer. A gate on the output does not count.

    Args:
        attention: attention module of the layer.
        states: input of the attention, [B, 2 T, hidden].
        rotary: the family's cos and sin, [B or 1, 2 T, R].
        residual: h, [B, 2 T, hidden].
    Returns:
        Float32 [B, H, T].
    """
    grouped, key, value, _ = rotated_states(attention, states, rotary)
    kv_heads, length, dim = key.shape[1:]
    half = length // 2
    out = attention.o_proj.weight.float().unflatten(1, (kv_heads, -1, dim))  # [hidden, H, group, D]
    gram = torch.einsum("ohgd,ohge->hgde", out, out)
    old = value[:, :, None, :half]
    norms = ((old @ gram) * old).sum(-1).clamp_min(0).sqrt()  # of W_o v, [B, H, group, T]
    weight = residual[:, half:].float().norm(dim=-1).clamp_min(1e-12).reciprocal()  # [B, T]
    places = torch.arange(length, device=states.device)
    best = torch.zeros_like(norms[:, :, 0])
    for begin in range(half, length, QUERY_BLOCK):
        rows = slice(begin, begin + QUERY_BLOCK)
        scores = grouped[..., rows, :] @ key[:, :, None].transpose(-1, -2) * attention.scaling
        shares = scores.masked_fill_(places > places[rows, None], -torch.inf).softmax(-1)[..., :half]
        shares = shares * weight[:, None, None, begin - half : begin - half + QUERY_BLOCK, None]
        best = torch.maximum(best, (shares.amax(3) * norms).amax(2))
    return best
