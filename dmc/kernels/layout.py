"""Declaration of a cache's content: the model's shape, keys and values, the gates' state, and a policy's fields."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from dmc.compression import CompressionConfig
from dmc.ranks import ALONE, Ranks

KV_CACHE_DTYPES = ("auto", "int8")
"""What keys and values of slots may be stored in; "auto" is the model's dtype."""
FIRST_TABLE_BLOCKS = 4
"""Initial number of blocks of a head's block table, which grows."""
ENTRY_PAGES, ENTRY_SCALES = ("key_pages", "value_pages"), ("key_scales", "value_scales")


@dataclass(frozen=True)
class Field:
    """A tensor that the cache keeps for each slot, block or row; the store allocates, moves and frees it."""

    name: str
    dtype: torch.dtype
    per: Literal["slot", "block", "row"]
    """slot: [N, block, *shape], moves with the slot; block: [N, ceil(block / every), *shape], stays in its block;
    row: [layers, C, *shape], belongs to a sequence."""
    shape: tuple[int, ...] = ()
    """Shape of one element."""
    every: int = 1
    """For per="block": number of slots that share one element."""
    start: float = 0.0
    """For per="row": initial value."""
    num_layers: int | None = None
    """For per="row": number of layers that keep it; None: all without a window."""

    def shape_of(self, block_size: int) -> tuple[int, ...]:
        """Return the shape that one block, or for per="row" one row of one layer, takes."""
        if self.per == "row":
            return self.shape
        return (-(-block_size // self.every), *self.shape)

    def num_bytes(self, block_size: int) -> int:
        """Return the bytes of `shape_of`."""
        return math.prod(self.shape_of(block_size)) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheLayout:
    """Shape of a cache; `compression` None is a plain cache that appends every token."""

    num_layers: int
    """Number of layers that keep all tokens, but for what gates or a policy compress: those without a window."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of the model, and of raw tokens beside the pages."""
    device: torch.device
    compression: CompressionConfig | None = None
    ranks: Ranks = ALONE
    """Processes that share the model, each with its own heads; `num_kv_heads` is this process's number."""
    num_query_heads: int = 0
    """This process's number of query heads; only policies use it."""
    policy_fields: tuple[Field, ...] = ()
    """Fields that a policy keeps beside keys and values."""
    offloaded: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Runs of layers that a policy keeps partly in the host's memory, by name of the run."""
    page_dtype: torch.dtype | None = None
    """Of keys and values in pages: int8, each with a float32 scale; None: `dtype`."""
    windows: tuple[int | None, ...] = ()
    """Window of each layer of the model: it sees, and keeps, that many last tokens; None: all; 0: none, it has no
    attention. Empty: all layers keep all.

    The cache counts layers without a window first, then those with one, where the position p is in slot p % window,
    then those without attention.
    """
    state_fields: tuple[Field, ...] = ()
    """What layers without attention keep of each sequence, in the order of these layers."""

    def stored_as(self, kv_cache_dtype: str) -> CacheLayout:
        """Return the layout with pages of one of `KV_CACHE_DTYPES`.

        Raises:
            ValueError: it is none of these.
        """
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            expected = "'auto' (the model's dtype) or 'int8' (8 bits, with a scale for each key and value)"
            raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r}: expected {expected}")
        return dataclasses.replace(self, page_dtype=torch.int8 if kv_cache_dtype == "int8" else None)

    @cached_property
    def rings(self) -> tuple[int, ...]:
        """Windows of the layers that have one."""
        return tuple(window for window in self.windows if window)

    @property
    def num_paged_layers(self) -> int:
        """Number of layers that keep tokens, all of them or the last."""
        return self.num_layers + len(self.rings)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes that layers without attention keep of one sequence, whatever its length."""
        return sum(field.num_bytes(1) * (field.num_layers or 0) for field in self.state_fields)

    def ring_blocks(self, block_size: int) -> int:
        """Return the blocks of the largest ring, as wide as tables of rings are."""
        return -(-max(self.rings, default=0) // block_size)

    @cached_property
    def places(self) -> list[int]:
        """Index in the cache of each layer of the model."""
        full, ring, recurrent = map(itertools.count, (0, self.num_layers, self.num_paged_layers))
        return [
            next(full if window is None else ring if window else recurrent)
            for window in self.windows or (None,) * self.num_layers
        ]

    def window_of(self, place: int) -> int | None:
        """Return the window of a layer by its index in the cache."""
        if place < self.num_layers:
            return None
        return self.rings[place - self.num_layers] if place < self.num_paged_layers else 0

    def most_blocks(self, num_tokens: int, block_size: int, ratio: float = 1.0) -> int:
        """Return the blocks of a sequence whose layers without a window hold one entry for `ratio` tokens."""
        full = self.num_layers * math.ceil(num_tokens / ratio / block_size)
        return self.num_kv_heads * (full + sum(-(-min(num_tokens, ring) // block_size) for ring in self.rings))

    @property
    def history_size(self) -> int:
        """Raw tokens kept beside the pages (R): those the gate's delay holds back, and the rest of the merge window."""
        return history_size(self.compression)

    @property
    def keeps_mean(self) -> bool:
        """Whether the open slot's mean and weight are kept as separate state: merging without a window."""
        return (
            self.compression is not None and self.compression.action == "merge" and self.compression.window_size is None
        )

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return all declared fields."""
        heads, size, dim = (self.num_kv_heads,), self.history_size, self.head_dim
        ring = (*heads, size)
        fields = [
            *self._entry_fields,
            Field("block_tables", torch.int32, "row", (*heads, FIRST_TABLE_BLOCKS)),
            Field("ring_tables", torch.int32, "row", (*heads, 0), num_layers=len(self.rings)),
            Field("lengths", torch.int32, "row", heads, num_layers=self.num_paged_layers),
            Field("history_key", self.dtype, "row", (*ring, dim)),
            Field("history_value", self.dtype, "row", (*ring, dim)),
            Field("history_decisions", torch.bool, "row", ring),
            Field("history_omega", torch.float32, "row", ring),
        ]
        if self.keeps_mean:
            fields += [
                Field("mean", torch.float32, "row", (*heads, 2 * dim)),
                Field("weight", torch.float32, "row", heads),
            ]
        return (*fields, *self.state_fields, *self.policy_fields)

    @property
    def _entry_fields(self) -> list[Field]:
        kept = [Field(name, self.page_dtype or self.dtype, "slot", (self.head_dim,)) for name in ENTRY_PAGES]
        scales = [Field(name, torch.float32, "slot", (1,)) for name in ENTRY_SCALES]
        return kept if self.page_dtype is None else [*kept, *scales]

    @property
    def entry_bytes(self) -> int:
        """Return the bytes of the key and the value of one slot."""
        return sum(field.num_bytes(1) for field in self._entry_fields)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block, with all data kept for its slots."""
        return sum(field.num_bytes(block_size) for field in self.fields if field.per != "row")

    @property
    def delay(self) -> int:
        """Number of raw recent tokens that every head holds (W)."""
        return 0 if self.compression is None else self.compression.delay


def history_size(config: CompressionConfig | None) -> int:
    """Raw tokens kept beside the pages (R): those the delay holds back, and the rest of the merge window."""
    if config is None:
        return 0
    window = config.window_size if config.action == "merge" else None
    return config.delay + (0 if window is None else window - 1)
