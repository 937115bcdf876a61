"""Method by family: each pair runs, or is refused when the engine is built; there is no third."""

import copy
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from covering import cover
from evicting import write_scorer
from tiny_families import OF_FAMILY, compressed_of, stock_of, texts
from transformers import AutoModelForCausalLM

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.models import FAMILIES

QUARTER, FOLDER = Budget(ratio=4), TemporaryDirectory()
BLOCKS = {"block_size": 4, "representatives": 2, "initial": 2, "local": 6, "chunk": 8}
OPTIONS = {
    "StreamingLLM, rerotate": {"rerotate": True},
    "ExpectedAttention": {"future": 40},
    "KVzip": {"sinks": 2, "chunk": 11, "lead": 3, "instruction": [5, 9]},
    "AttentionMatching": {"sinks": 2, "chunk": 11, "queries": 20, "instruction": [5, 9]},
    "Quest": {"page_size": 4},
    "InfLLM": BLOCKS,
    "OmniKV": {"filter_layers": (0,)},
    "Marked": {"markers": [3, 20]},
    "KVpop": {},
}
EVERY = {name: getattr(policies, name) for name in policies.__all__ if isinstance(getattr(policies, name), type)}
METHODS = sorted(
    {name for name, kind in EVERY.items() if hasattr(kind, "budget") or "budget" in getattr(kind, "__annotations__", {})}
    - {"CachePolicy", "EvictionPolicy", "ReadingPolicy"}
) + ["StreamingLLM, rerotate"]
GATES = {"full cache": None, "gates, merge": {}, "gates, drop": {"action": "drop", "delay": 4}}
REFUSED = {
    "OmniKV": "the model has layers 0 to|hold .* of the",
    "gates, SnapKV": None,
}
