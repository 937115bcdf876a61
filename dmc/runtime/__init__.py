"""Inference on a paged cache: allocator, cache, scheduler, engine, and the cache of `generate()`.

A cache is a set of fields, declared per slot, block or row (`dmc.kernels.layout`): keys and values, the gates' state,
and a policy's fields. One store allocates, grows, resets, copies and counts all of them; each (layer, sequence, KV
head) has a block table, and the data of a slot or block moves and is freed with it.
"""

from dmc.runtime.engine import Engine
from dmc.runtime.generation import Generation, GenerationStats, Scoring
from dmc.runtime.hf_cache import PagedGenerationCache
from dmc.runtime.options import SamplingParams
from dmc.runtime.request import Request, TokenEvent
from dmc.runtime.session import FrozenSession, Session

__all__ = [
    "Engine",
    "FrozenSession",
    "Generation",
    "GenerationStats",
    "PagedGenerationCache",
    "Request",
    "SamplingParams",
    "Scoring",
    "Session",
    "TokenEvent",
]
