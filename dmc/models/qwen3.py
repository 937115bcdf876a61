"""Qwen3 with learned cache compression."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from dmc.models.attention import CompressedAttentionMixin
from dmc.models.modeling import CompressedCausalLM, CompressedConfigMixin


class DMCQwen3Config(CompressedConfigMixin, Qwen3Config):
    """Qwen3's configuration plus `compression`."""

    model_type = "dmc_qwen3"


class DMCQwen3Attention(CompressedAttentionMixin, Qwen3Attention):
    """Qwen3's projections under the compressed forward; the neuron is read after q_norm and k_norm."""

    q_norm: nn.Module
    k_norm: nn.Module

    def normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the per-head RMS norms of queries and keys, [B, T, heads, D]."""
        return self.q_norm(query), self.k_norm(key)


class DMCQwen3ForCausalLM(CompressedCausalLM, Qwen3ForCausalLM):
    """Qwen3 whose KV heads merge or drop cache entries."""

    config_class = DMCQwen3Config
    attention_class = DMCQwen3Attention
