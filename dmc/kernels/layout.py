"""What a cache keeps, declared: the model's shape, keys and values, the gates' state, and the fields of a policy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch

from dmc.compression import CompressionConfig
from dmc.ranks import ALONE, Ranks

FIRST_TABLE_BLOCKS = 4
"""Of a head's block table, which grows."""


@dataclass(frozen=True)
class Field:
    """What a cache keeps for each slot, block or row, declared once; its store does the rest."""

    name: str
    dtype: torch.dtype
    per: Literal["slot", "block", "row"]
    """slot: [N, block, *shape], it moves with the slot; block: [N, ceil(block / every), *shape], it stays where it is;
    row: [layers, C, *shape], it belongs to a sequence."""
    shape: tuple[int, ...] = ()
    """Of one."""
    every: int = 1
    """Of a block: one for so many of its slots, rounded up."""
    start: float = 0.0
    """Of a row: what it begins with."""
    num_layers: int | None = None
    """Of a row: layers that keep it; None: all."""

    def shape_of(self, block_size: int) -> tuple[int, ...]:
        """Of what one block (`slot`, `block`), or one row of one layer, takes."""
        if self.per == "row":
            return self.shape
        return (-(-block_size // self.every), *self.shape)

    def num_bytes(self, block_size: int) -> int:
        """Bytes of the same."""
        return math.prod(self.shape_of(block_size)) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheLayout:
    """Shape of a cache; `compression` None is a plain cache that appends every token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    compression: CompressionConfig | None = None
    ranks: Ranks = ALONE
    """The processes that share the model, each with its own heads; `num_kv_heads` counts this one's."""
    num_query_heads: int = 0
    """This process's; only policies ask."""
    policy_fields: tuple[Field, ...] = ()
    """What a policy keeps beside keys and values."""
    offloaded: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Layers of which a policy keeps a part in the host's memory, in runs by name."""

    @property
    def history_size(self) -> int:
        """Raw tokens kept beside the pages (R): those the gate's delay holds back, and the rest of the merge window."""
        return history_size(self.compression)

    @property
    def keeps_mean(self) -> bool:
        """Whether the open slot's mean and weight are state of their own: merging without a window."""
        return (
            self.compression is not None and self.compression.action == "merge" and self.compression.window_size is None
        )

    @property
    def fields(self) -> tuple[Field, ...]:
        """All that is kept."""
        heads, size, dim = (self.num_kv_heads,), self.history_size, self.head_dim
        ring = (*heads, size)
        own = [
            Field("key_pages", self.dtype, "slot", (dim,)),
            Field("value_pages", self.dtype, "slot", (dim,)),
            Field("block_tables", torch.int32, "row", (*heads, FIRST_TABLE_BLOCKS)),
            Field("lengths", torch.int32, "row", heads),
            Field("history_key", self.dtype, "row", (*ring, dim)),
            Field("history_value", self.dtype, "row", (*ring, dim)),
            Field("history_merged", torch.bool, "row", ring),
            Field("history_omega", torch.float32, "row", ring),
        ]
        if self.keeps_mean:
            own += [
                Field("mean", torch.float32, "row", (*heads, 2 * dim)),
                Field("weight", torch.float32, "row", heads),
            ]
        return (*own, *self.policy_fields)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block, all that is kept for its slots included."""
        return sum(each.num_bytes(block_size) for each in self.fields if each.per != "row")

    @property
    def delay(self) -> int:
        """Raw recent tokens every head holds (W)."""
        return 0 if self.compression is None else self.compression.delay


def history_size(config: CompressionConfig | None) -> int:
    """Raw tokens kept beside the pages (R): those the delay holds back, and the rest of the merge window."""
    if config is None:
        return 0
    window = config.window_size if config.action == "merge" else None
    return config.delay + (0 if window is None else window - 1)
