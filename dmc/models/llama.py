"""Llama 2 and 3 with learned cache compression."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from dmc.models.attention import CompressedAttentionMixin
from dmc.models.modeling import CompressedCausalLM, CompressedConfigMixin


class DMCLlamaConfig(CompressedConfigMixin, LlamaConfig):
    """Llama's configuration plus `compression`."""

    model_type = "dmc_llama"


class DMCLlamaAttention(CompressedAttentionMixin, LlamaAttention):
    """Llama's projections under the compressed forward."""


class DMCLlamaForCausalLM(CompressedCausalLM, LlamaForCausalLM):
    """Llama whose KV heads merge or drop cache entries."""

    config_class = DMCLlamaConfig
    attention_class = DMCLlamaAttention
