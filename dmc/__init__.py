"""Learned KV-cache compression: retrofit, export, serve, compare."""

from dmc.models import CompressedCausalLM, load_model, retrofit
from dmc.runtime import Engine, PagedGenerationCache, SamplingParams

CompressedCausalLM.cache_factory = PagedGenerationCache

__version__ = "0.1.0"

__all__ = ["Engine", "SamplingParams", "__version__", "load_model", "retrofit"]
