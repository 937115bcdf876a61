"""Serving from pages: allocator, cache, scheduler, engine, and the cache of `generate()`."""

from dmc.runtime.engine import Engine
from dmc.runtime.generation import Generation, GenerationStats, Scoring
from dmc.runtime.hf_cache import PagedGenerationCache
from dmc.runtime.request import Request, TokenEvent
from dmc.runtime.sampling import SamplingParams
from dmc.runtime.session import Session

__all__ = [
    "Engine",
    "Generation",
    "GenerationStats",
    "PagedGenerationCache",
    "Request",
    "SamplingParams",
    "Scoring",
    "Session",
    "TokenEvent",
]
