"""Storage of a cache whose length differs per layer, KV head and sequence: pages, block tables, raw history, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmc.budget import entry_bytes
from dmc.compression import CompressionConfig
from dmc.kernels.base import LayerCache, history_size
from dmc.ranks import ALONE, Ranks
from dmc.runtime.allocator import BlockAllocator, OutOfBlocksError
from dmc.runtime.arguments import index_of
from dmc.runtime.side_store import SideLayout, SideStore
from dmc.runtime.tally import Tally

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Entries per page; 256 is there for flash-attn 2, which takes no smaller ones."""
FIRST_POOL_BLOCKS = 256


def check_block_size(block_size: int) -> int:
    """Return entries of a page as an int.

    Raises:
        ValueError: it is not one of `BLOCK_SIZES`.
    """
    if (size := index_of(block_size)) not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size!r}: expected one of {', '.join(map(str, BLOCK_SIZES))}")
    assert size is not None
    return size


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
    notes: SideLayout | None = None
    """What a policy keeps beside keys and values."""

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

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: keys, values and notes."""
        notes = 0 if self.notes is None else self.notes.block_bytes(self, block_size)
        return block_size * entry_bytes(self.head_dim, self.dtype.itemsize) + notes

    @property
    def delay(self) -> int:
        """Raw recent tokens every head holds (W)."""
        return 0 if self.compression is None else self.compression.delay


class PagedCache:
    """Pages shared by all layers, heads and sequences; one block table per (layer, sequence, KV head).

    Rows are sequences. The pool grows on demand when `num_blocks` is None, else it is fixed. All tensors of a row are
    allocated whether it is used or not; `bytes_allocated` is one sequence's share.

    Raises:
        ValueError: the block size is not one of `BLOCK_SIZES`.
    """

    def __init__(self, layout: CacheLayout, max_sequences: int, block_size: int = 16, num_blocks: int | None = None):
        block_size = check_block_size(block_size)
        self.layout, self.block_size, self.grows = layout, block_size, num_blocks is None
        self.allocator = BlockAllocator(FIRST_POOL_BLOCKS if num_blocks is None else num_blocks, layout.device)
        heads = (layout.num_layers, max_sequences, layout.num_kv_heads)
        entry: dict[str, Any] = {"dtype": layout.dtype, "device": layout.device}
        state: dict[str, Any] = {"dtype": torch.float32, "device": layout.device}
        self.key_pages = torch.zeros(self.allocator.num_blocks, block_size, layout.head_dim, **entry)
        self.value_pages = torch.zeros_like(self.key_pages)
        self.block_tables = torch.zeros(*heads, 4, dtype=torch.int32, device=layout.device)
        self.lengths = torch.zeros(heads, dtype=torch.int32, device=layout.device)
        self.tokens_seen = torch.zeros(max_sequences, dtype=torch.long)
        size = layout.history_size
        self.history_key = torch.zeros(*heads, size, layout.head_dim, **entry)
        self.history_value = torch.zeros(*heads, size, layout.head_dim, **entry)
        self.history_merged = torch.zeros(*heads, size, dtype=torch.bool, device=layout.device)
        self.history_omega = torch.zeros(*heads, size, **state)
        self.mean = torch.zeros(*heads, 2 * layout.head_dim, **state) if layout.keeps_mean else None
        self.weight = torch.zeros(heads, **state) if layout.keeps_mean else None
        self.notes: SideStore | None = None
        if layout.notes is not None:
            self.notes = layout.notes.store(layout, max_sequences, self.allocator.num_blocks, block_size)
        self.tally = Tally(heads, block_size, layout.device)
        self._layers: dict[int, LayerCache] = {}
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._grows_by_layer = False
        self._known_free = self.allocator.num_blocks
        self._fed_since_known = torch.zeros(max_sequences, dtype=torch.long)

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free_rows)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys, values and notes."""
        return self.layout.block_bytes(self.block_size)

    def open_row(self) -> int:
        """Start an empty sequence and return its row."""
        row = self._free_rows.pop()
        self.lengths[:, row] = 0
        self.tokens_seen[row] = 0
        # what another sequence has left may be no number, and 0 times it none either
        for state in (self.history_key, self.history_value, self.history_omega, self.mean, self.weight):
            if state is not None:
                state[:, row] = 0
        if self.notes is not None:
            self.notes.open_row(row)
        return row

    def close_row(self, row: int) -> None:
        """End a sequence: its blocks return to the pool."""
        self.allocator.free(self._owned_blocks(row))
        self.lengths[:, row] = 0
        self.tokens_seen[row] = 0
        if self.notes is not None:
            self.notes.close_row(row)
        self._free_rows.append(row)
        self._count_free()

    def reset(self) -> None:
        """End every sequence, whatever state an interrupted forward pass has left behind."""
        self.allocator.reset()
        self.lengths.zero_()
        self.tokens_seen.zero_()
        if self.notes is not None:
            for row in range(len(self.tokens_seen)):
                self.notes.close_row(row)
        self._free_rows = list(range(len(self.tokens_seen) - 1, -1, -1))
        self._known_free = self.allocator.num_blocks  # not asked of the other ranks: this one may have failed alone
        self._fed_since_known.zero_()

    def copy_rows(self, sources: list[int], targets: list[int]) -> None:
        """Make sequences `targets` equal `sources` in one go; a row may be both (beam search reorders)."""
        assert self.notes is None, "a cache with notes is never reordered"
        order = torch.tensor(sources)
        tables, lengths = self.block_tables[:, order].clone(), self.lengths[:, order].clone()
        needed = int((-(-lengths // self.block_size)).sum())
        old = torch.cat([self._owned_blocks(row) for row in targets])
        missing = needed - self.allocator.num_free
        if missing > 0:
            self._grow_pool(missing)
        fresh = self.allocator.allocate(needed)
        owned = torch.arange(tables.shape[-1], device=tables.device) < -(-lengths[..., None] // self.block_size)
        taken = tables[owned].long()
        self.key_pages[fresh.long()], self.value_pages[fresh.long()] = self.key_pages[taken], self.value_pages[taken]
        tables[owned] = fresh
        self.block_tables[:, targets], self.lengths[:, targets] = tables, lengths
        self.tokens_seen[targets] = self.tokens_seen[order]
        for state in (
            self.history_key,
            self.history_value,
            self.history_merged,
            self.history_omega,
            self.mean,
            self.weight,
        ):
            if state is not None:
                state[:, targets] = state[:, order].clone()
        self.allocator.free(old)
        self._count_free()

    def _owned_blocks(self, row: int) -> Tensor:
        tables = self.block_tables[:, row]
        owned = torch.arange(tables.shape[-1], device=tables.device) < -(
            -self.lengths[:, row, :, None] // self.block_size
        )
        return tables[owned]

    def layer(self, index: int) -> LayerCache:
        """Layer `index` as kernels see it; valid until the pool or the tables grow."""
        if index not in self._layers:
            self._layers[index] = self._view(index)
        return self._layers[index]

    def _view(self, index: int) -> LayerCache:
        return LayerCache(
            key_pages=self.key_pages,
            value_pages=self.value_pages,
            free_blocks=self.allocator.stack,
            num_free=self.allocator.height,
            block_tables=self.block_tables[index],
            lengths=self.lengths[index],
            history_key=self.history_key[index],
            history_value=self.history_value[index],
            history_merged=self.history_merged[index],
            history_omega=self.history_omega[index],
            mean=None if self.mean is None else self.mean[index],
            weight=None if self.weight is None else self.weight[index],
        )

    def fits(self, rows: list[int | None], num_new: list[int]) -> bool:
        """Whether feeding `num_new[i]` tokens to each row (None: to a new one) cannot run out of blocks.

        Every token is taken to be appended. The device is asked for the lengths only when what was known of it last
        does not settle the question.
        """
        return self.grows or self._missing_blocks(rows, num_new) <= 0

    def has_free(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, on every rank; the device is asked as by `fits`."""
        if self.grows or num_blocks <= self._known_free - self._most_taken(self._fed_since_known):
            return True
        self._count_free()
        return num_blocks <= self._known_free

    def blocks_expected(self, row: int, num_tokens: int) -> int:
        """Blocks of a sequence when `num_tokens` of it are fed, if it goes on as it began; the most of any rank.

        Tokens that a delay holds back count as if they lay in pages.
        """
        seen = int(self.tokens_seen[row])
        if seen == 0:
            return 0
        entries = self.lengths[:, row].long() + min(seen, self.layout.delay)
        blocks = -(-entries * num_tokens // (seen * self.block_size))
        return self.layout.ranks.maximum(int(blocks.sum()))

    def reserve(self, rows: list[int], num_new: list[int]) -> None:
        """Make sure that a forward pass over these tokens cannot run out of blocks or of table space halfway.

        A pool that grows does so layer by layer when a prompt is fed, in `make_room`: room for all layers uncompressed
        would defeat the compression.

        Raises:
            OutOfBlocksError: the pool is fixed and has too few free blocks; nothing has changed.
        """
        self._grows_by_layer = self.grows and max(num_new) > 1
        if self._grows_by_layer:
            self._known_free = 0
        else:
            missing = self._missing_blocks(list(rows), num_new)
            if missing > 0:
                self._grow_pool(missing)
                self._count_free()
        self._fed_since_known[rows] += torch.tensor(num_new)
        most_tokens = int((self.tokens_seen[rows] + torch.tensor(num_new)).max())
        capacity, wanted = self.block_tables.shape[-1], -(-most_tokens // self.block_size)
        if wanted > capacity:
            self.block_tables = torch.nn.functional.pad(self.block_tables, (0, max(wanted, 2 * capacity) - capacity))
            self._layers.clear()

    def make_room(self, num_sequences: int, num_new: int) -> None:
        """Let a pool that grows hold `num_new` more tokens of so many sequences in one layer.

        Decoding sequences ask too where they share a pass with a prompt.
        """
        if self._grows_by_layer:
            wanted = num_sequences * self.layout.num_kv_heads * -(-num_new // self.block_size)
            missing = wanted - self.allocator.num_free
            if missing > 0:
                self._grow_pool(missing)

    def _missing_blocks(self, rows: list[int | None], num_new: list[int]) -> int:
        """Blocks that could be lacking if every token is appended; <= 0: none."""
        heads = self.layout.num_layers * self.layout.num_kv_heads
        pages = sum(-(-count // self.block_size) for count, row in zip(num_new, rows, strict=True) if row is None)
        new_rows = heads * pages
        old = [(row, count) for row, count in zip(rows, num_new, strict=True) if row is not None]
        index, counts = [row for row, _ in old], torch.tensor([count for _, count in old], dtype=torch.long)
        fed = self._fed_since_known.clone()
        fed[index] += counts
        most_taken = self._most_taken(fed) + new_rows
        if most_taken <= self._known_free:
            return most_taken - self._known_free
        self._count_free()
        lengths = self.lengths[:, index].long()
        grown = lengths + counts.to(lengths.device)[None, :, None]
        needed = (-(-grown // self.block_size) - -(-lengths // self.block_size)).sum()
        return self.layout.ranks.maximum(int(needed)) + new_rows - self._known_free

    def _most_taken(self, num_fed: Tensor) -> int:
        """Blocks that rows may have taken that were fed so many tokens each, int64 [C]."""
        return self.layout.num_layers * self.layout.num_kv_heads * int((-(-num_fed // self.block_size)).sum())

    def _count_free(self) -> None:
        """Ask the device, and the other ranks: all must decide alike what fits."""
        self._known_free = self.layout.ranks.minimum(self.allocator.num_free)
        self._fed_since_known.zero_()

    def _grow_pool(self, missing: int) -> None:
        if not self.grows:
            raise OutOfBlocksError(
                f"{missing} more blocks may be needed than the {self.allocator.num_free} of "
                f"{self.allocator.num_blocks} that are free"
            )
        total = max(2 * self.allocator.num_blocks, self.allocator.num_blocks + missing)
        for name in ("key_pages", "value_pages"):
            pages = getattr(self, name)
            grown = pages.new_zeros(total, *pages.shape[1:])
            grown[: pages.shape[0]] = pages
            setattr(self, name, grown)
        if self.notes is not None:
            self.notes.grow(total)
        self.allocator.grow(total)
        self._layers.clear()

    def slots(self, row: int) -> Tensor:
        """Entries held by each head of all ranks, raw recent tokens included, int64 [L, H]."""
        recent = min(int(self.tokens_seen[row]), self.layout.delay)
        elsewhere = 0 if self.notes is None else self.notes.slots_elsewhere(row)[:, None]
        return self.layout.ranks.join_heads(self.lengths[:, row].long().cpu()) + recent + elsewhere

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence beside its pages: raw history, means, lengths and block tables."""
        history = (self.history_key, self.history_value, self.history_merged, self.history_omega)
        parts = (*history, self.mean, self.weight, self.lengths, self.block_tables)
        beside = 0 if self.notes is None else self.notes.row_bytes
        return beside + sum(part[:, 0].numel() * part.element_size() for part in parts if part is not None)

    def bytes_allocated(self, row: int) -> int:
        """Bytes held for a sequence on all ranks: whole pages, tables and all state, in fast memory and slow."""
        slow = 0 if self.notes is None else self.notes.slow_bytes_allocated(row)
        return self.bytes_fast(row) + self.layout.ranks.total(slow)

    def bytes_fast(self, row: int) -> int:
        """Of `bytes_allocated`, those on the cache's device."""
        return self.layout.ranks.total(self._owned_blocks(row).numel() * self.block_bytes + self.state_bytes)

    def bytes_used(self, row: int) -> int:
        """Bytes of a sequence's slots and state on all ranks, without the unused rest of its last pages."""
        slots = int(self.lengths[:, row].sum())
        slow = 0 if self.notes is None else self.notes.slow_bytes_used(row)
        return self.layout.ranks.total(slots * self.block_bytes // self.block_size + self.state_bytes + slow)
