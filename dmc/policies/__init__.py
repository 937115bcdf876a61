"""Training-free methods: what they keep of the cache, or read of it, at run time."""

from dmc.policies.base import CachePolicy, Entries, EvictionPolicy, Rewrite
from dmc.policies.h2o import H2O
from dmc.policies.snapkv import SnapKV
from dmc.policies.tova import TOVA
from dmc.policies.window import LocalWindow, StreamingLLM

__all__ = [
    "H2O",
    "TOVA",
    "CachePolicy",
    "Entries",
    "EvictionPolicy",
    "LocalWindow",
    "Rewrite",
    "SnapKV",
    "StreamingLLM",
]
