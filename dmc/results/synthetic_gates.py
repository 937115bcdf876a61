"""Gates that decide at random at a chosen compression ratio, for measuring speed and memory without training."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dmc.budget import check_ratio
from dmc.compression import CompressionConfig, Compressor, DecidedTokens

SPREAD = 0.5
"""Heads keep between 1 - SPREAD and 1 + SPREAD times the mean share of tokens, so that their lengths differ."""


class SyntheticCompressor(Compressor):
    """Decides for every token at random, with otherwise the computation and cost of a learned gate.

    Args:
        config: settings of the gates.
        head_dim: D.
        keep: share of tokens that each KV head appends, [H].
        seed: seed of the decisions; on a GPU that of torch's own generator, from which all layers draw.
    """

    def __init__(self, config: CompressionConfig, head_dim: int, keep: Tensor, seed: int) -> None:
        super().__init__(config, head_dim)
        self.keep = keep
        # CUDA graphs draw anew by torch's own generators alone
        own = torch.cuda.default_generators[keep.device.index] if keep.is_cuda else torch.Generator(keep.device)
        self.generator = own.manual_seed(seed)

    def decide(self, query: Tensor, key: Tensor, value: Tensor, adapted: Tensor | None = None) -> DecidedTokens:
        """See `Compressor.decide`; the decisions are drawn."""
        tokens = super().decide(query, key, value, adapted)
        drawn = torch.rand(tokens.decisions.shape, generator=self.generator, device=key.device)
        return dataclasses.replace(tokens, decisions=drawn >= self.keep[:, None])


def set_synthetic_gates(model: Any, ratio: float, seed: int = 0) -> None:
    """Let every gate of a compressed model decide at random so that the cache's ratio tends to `ratio`.

    Raises:
        ValueError: the ratio is below 1.
    """
    check_ratio(ratio, "ratio")
    generator = torch.Generator().manual_seed(seed)
    config = model.compression
    for index, layer in enumerate(model.compressed_layers):
        attention = layer.self_attn
        kv_heads = attention.k_proj.weight.shape[0] // attention.head_dim
        share = 1 + min(SPREAD, ratio - 1) * (2 * (torch.arange(kv_heads) + 0.5) / kv_heads - 1)
        keep = share[torch.randperm(kv_heads, generator=generator)] / ratio
        keep = keep.to(attention.k_proj.weight.device)
        attention.compressor = SyntheticCompressor(config, attention.head_dim, keep, seed + index)
