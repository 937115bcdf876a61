"""Mistral with learned cache compression."""

from __future__ import annotations

from transformers import MistralConfig, MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralAttention

from dmc.models.attention import CompressedAttentionMixin
from dmc.models.modeling import CompressedCausalLM, CompressedConfigMixin


class DMCMistralConfig(CompressedConfigMixin, MistralConfig):
    """Mistral's configuration plus `compression`."""

    model_type = "dmc_mistral"


class DMCMistralAttention(CompressedAttentionMixin, MistralAttention):
    """Mistral's projections under the compressed forward."""


class DMCMistralForCausalLM(CompressedCausalLM, MistralForCausalLM):
    """Mistral whose KV heads merge or drop cache entries."""

    config_class = DMCMistralConfig
    attention_class = DMCMistralAttention
