"""Serving from pages: allocator, cache, scheduler, engine, and the cache of `generate()`.

A cache is a set of fields, declared per slot, block or row (`dmc.kernels.layout`): keys and values, the gates' state,
and what a policy asks for. One store allocates, grows, forgets, copies and counts all of them; a block table for each
(layer, sequence, KV head) says which blocks are whose, and what belongs to a slot or block comes and goes with it.
"""

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
