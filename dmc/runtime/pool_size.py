"""Size of the pool of pages: what `memory=` asks for, beside the activations of the largest forward pass."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from dmc.compression.full_attention import context_length
from dmc.kernels.layout import CacheLayout
from dmc.kernels.probabilities import QUERY_BLOCK
from dmc.kernels.recurrent import RECURRENT_STATE
from dmc.runtime.options import EngineOptions

AUTO_FRACTION = {"cpu": 0.5, "cuda": 0.85}
"""Share of the free memory that "auto" gives to pages and activations; the rest covers the allocator's fragmentation
and, on a CPU, other programs."""

RECURRENT_CHUNK = 64
"""Tokens that transformers' gated delta net takes together."""
TABLE_BYTES = 4
"""Of a block's number in a table."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Activations:
    """Memory that forward passes need beside the pages."""

    largest: int
    """Bytes of the largest pass."""
    logits: int
    """Bytes of the largest logits of a pass."""
    share: float
    """Bytes for each byte of pages: every token of a pass takes page space, so that a small pool has small passes."""
    share_of_layers: float
    """Bytes for each byte of pages without logits."""

    def room(self, usable: int) -> int:
        """Return the largest number of bytes for pages that leaves room for every pass."""
        beside_logits = int((usable - self.logits) / (1 + self.share_of_layers))
        return max(usable - self.largest, beside_logits, int(usable / (1 + self.share)))

    @classmethod
    def of(
        cls,
        config: Any,
        layout: CacheLayout,
        num_tokens: int,
        num_logits: int | None = None,
        shows_attention: bool = False,
    ) -> Activations:
        """Compute bounds from a model's configuration.

        Layers run one after the other, so the bound is one layer's attention or MLP, or the logits of all tokens with
        their log-probabilities, as scoring computes them.

        Args:
            config: configuration of a transformers causal LM.
            layout: layout of its cache.
            num_tokens: tokens of the largest pass.
            num_logits: number of its tokens that need logits at most; None: all.
            shows_attention: whether a policy reads attention, a block of queries at a time.
        """
        size, heads = layout.dtype.itemsize, config.num_attention_heads // layout.ranks.size
        attention = (heads + 2 * layout.num_kv_heads) * layout.head_dim
        experts = getattr(config, "num_experts_per_tok", None) or 1
        width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        width = max(width, experts * (getattr(config, "moe_intermediate_size", None) or width)) // layout.ranks.size
        layer = (
            size * (5 * config.hidden_size + max(6 * attention, 4 * width)) + 8 * config.hidden_size
        )  # norms: float32
        for field in layout.state_fields:
            if field.name == RECURRENT_STATE:  # queries, keys and values in float32, and products within chunks
                heads_of_states, key_dim, value_dim = field.shape
                layer += 4 * heads_of_states * (6 * (key_dim + value_dim) + 4 * RECURRENT_CHUNK)
        states, of_token = size * config.hidden_size, (size + 8) * config.vocab_size
        logits = of_token * (num_tokens if num_logits is None else num_logits)
        tokens = max(layer * num_tokens, states * num_tokens + logits)
        per_slot = 3 * 4 * QUERY_BLOCK * heads if shows_attention else 0
        held = layout.num_layers * layout.num_kv_heads * layout.entry_bytes or 1e-9  # windows do not grow
        largest = tokens + per_slot * config.max_position_embeddings
        shares = ((per_token + per_slot) / held for per_token in (max(layer, states + of_token), max(layer, states)))
        return cls(largest, logits, *shares)


@dataclass(frozen=True)
class Tables:
    """Block tables beside the pages, which hold a number for each block that a sequence can come to."""

    largest: int = 0
    """Bytes where all sequences have the model's full length."""
    share: float = 0.0
    """Bytes for each byte of pages, of which all could be one sequence's."""

    def room(self, usable: int) -> int:
        """Return the largest number of bytes for pages beside their tables."""
        return max(usable - self.largest, int(usable / (1 + self.share)))


def pool_blocks(options: EngineOptions, config: Any, layout: CacheLayout, has_policy: bool) -> int | None:
    """Return how many blocks an engine's pool has, the least of any rank; None: it grows.

    Args:
        options: of the engine.
        config: configuration of a transformers causal LM.
        layout: layout of its cache.
        has_policy: whether a policy compresses prompts, which are then fed whole and have their attention read.
    """
    context, rows, budget = context_length(config), options.max_batch_size, options.token_budget
    largest_pass = num_logits = rows * min(options.prefill_chunk_size or context, context)
    if budget is not None:  # which whole prompts under a policy exceed, at least the last one that is admitted
        num_logits = min(largest_pass, budget + rows)  # of a prompt only the last token's
        largest_pass = min(largest_pass, budget + (context if has_policy else 0))
    activations = Activations.of(config, layout, largest_pass, num_logits, shows_attention=has_policy)
    block = layout.block_bytes(options.block_size)
    most = rows * layout.most_blocks(context, options.block_size) * block
    gates = None if layout.policy_fields else layout.compression
    ratio, table = 1.0 if gates is None else gates.target_ratio, TABLE_BYTES * (rows + 1)
    longest = layout.num_layers * layout.num_kv_heads * -(-context // options.block_size)
    tables = Tables(table * longest, table * ratio / block)
    rings = table * len(layout.rings) * layout.num_kv_heads * layout.ring_blocks(options.block_size)
    fixed = rings + (rows + 1) * layout.recurrent_bytes
    limit = pool_bytes(options.memory, layout.device, most, activations, tables, fixed)
    return None if limit is None else layout.ranks.all_reduce(limit // block, "min")


def pool_bytes(
    memory: int | float | str | None,
    device: torch.device,
    most: int,
    activations: Activations,
    tables: Tables = Tables(),
    fixed: int = 0,
) -> int | None:
    """Turn a `memory=` setting into bytes.

    Args:
        memory: bytes as a whole number, a fraction of the device's free memory as a float, "auto", "auto/3" as one of
            three engines that share it, or None; checked by `EngineOptions`.
        device: device of the pages, which already holds the weights.
        most: upper limit of "auto" in bytes.
        activations: memory that "auto" leaves for passes.
        tables: memory that "auto" leaves for block tables.
        fixed: bytes that "auto" leaves for what is as large whatever the pages: tables of layers with a window, and the
            states of layers without attention.
    Returns:
        Bytes for pages; None: no limit.
    """
    if isinstance(memory, str):
        free, engines = free_bytes(device), int(memory.partition("/")[2] or 1)
        usable = int(AUTO_FRACTION.get(device.type, AUTO_FRACTION["cpu"]) * free) // engines - fixed
        chosen = min(tables.room(activations.room(usable)), most)
        logger.info(
            "memory=%s: %d bytes for the cache's pages, of %d that are free on %s", memory, chosen, free, device
        )
        return chosen
    return int(memory * free_bytes(device)) if isinstance(memory, float) else memory


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device, including those that torch has reserved."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)
