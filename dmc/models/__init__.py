"""Compressed members of the Hugging Face families, registered with the Auto* classes on import."""

from dmc.models.conversion import retrofit
from dmc.models.families import FAMILIES
from dmc.models.gqa import merge_kv_heads
from dmc.models.loading import load_model
from dmc.models.modeling import CompressedCausalLM
from dmc.models.token_losses import next_tokens, sequence_means, with_token_losses

__all__ = [
    "FAMILIES",
    "CompressedCausalLM",
    "load_model",
    "merge_kv_heads",
    "next_tokens",
    "retrofit",
    "sequence_means",
    "with_token_losses",
]
