"""Qwen2 with learned cache compression."""

from __future__ import annotations

from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from dmc.models.attention import CompressedAttentionMixin
from dmc.models.modeling import CompressedCausalLM, CompressedConfigMixin


class DMCQwen2Config(CompressedConfigMixin, Qwen2Config):
    """Qwen2's configuration plus `compression`."""

    model_type = "dmc_qwen2"


class DMCQwen2Attention(CompressedAttentionMixin, Qwen2Attention):
    """Qwen2's projections under the compressed forward."""


class DMCQwen2ForCausalLM(CompressedCausalLM, Qwen2ForCausalLM):
    """Qwen2 whose KV heads merge or drop cache entries."""

    config_class = DMCQwen2Config
    attention_class = DMCQwen2Attention
