"""Compressed members of the Hugging Face families, registered with the Auto* classes on import."""

from dmc.models.gqa import merge_kv_heads
from dmc.models.loading import load_model
from dmc.models.modeling import CompressedCausalLM, families, register_families, retrofit
from dmc.models.token_losses import next_tokens, sequence_means, with_token_losses

register_families()

__all__ = [
    "CompressedCausalLM",
    "families",
    "load_model",
    "merge_kv_heads",
    "next_tokens",
    "retrofit",
    "sequence_means",
    "with_token_losses",
]
