"""Serving from pages: allocator, cache, scheduler, engine, and the cache of `generate()`."""

from dmc.runtime.engine import Engine
from dmc.runtime.hf_cache import PagedGenerationCache
from dmc.runtime.sampling import SamplingParams
from dmc.runtime.sequence import Generation, GenerationStats

__all__ = ["Engine", "Generation", "GenerationStats", "PagedGenerationCache", "SamplingParams"]
