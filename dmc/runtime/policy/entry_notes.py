"""Storage of what eviction knows: notes of every entry, and a few numbers for each layer and sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmc.kernels.base import EntryNotes
from dmc.kernels.reference import gather_pages
from dmc.runtime.side_store import SideStore

if TYPE_CHECKING:
    from dmc.runtime.paged_cache import CacheLayout, PagedCache


@dataclass(frozen=True)
class NoteLayout:
    """What a policy asks the cache to keep beside keys and values."""

    num_sums: int
    """Running sums of every entry."""
    keeps_slots: bool
    """Whether entries may lie in another order than that of age, for they are evicted one by one."""
    memory_size: int
    """Numbers for each layer and sequence."""

    def block_bytes(self, layout: CacheLayout, block_size: int) -> int:
        """Position, slot and sums, 4 bytes each."""
        return 4 * (1 + self.keeps_slots + self.num_sums) * block_size

    def store(self, layout: CacheLayout, max_sequences: int, num_blocks: int, block_size: int) -> NoteStore:
        """See `SideLayout.store`."""
        return NoteStore(self, (layout.num_layers, max_sequences), num_blocks, block_size, layout.device)


class NoteStore(SideStore):
    """Notes in pages under the cache's own block tables, so that they come and go with the blocks.

    Args:
        layout: what is kept.
        shape: layers and sequences.
        num_blocks: blocks of the pool.
        block_size: entries of a block.
        device: where they lie.
    """

    def __init__(
        self, layout: NoteLayout, shape: tuple[int, int], num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.layout, self._block_size = layout, block_size
        pages = (num_blocks, block_size)
        self.position = torch.zeros(pages, dtype=torch.int32, device=device)
        self.slot = torch.zeros(pages, dtype=torch.int32, device=device) if layout.keeps_slots else None
        self.sums = torch.zeros(layout.num_sums, *pages, device=device)
        self.limits = torch.zeros(shape, dtype=torch.int32, device=device)
        """Entries per KV head that a layer may hold after its prompt, [L, C]."""
        self.nominal = torch.zeros_like(self.limits)
        """The same before layers shared out what they have together."""
        self.memory = torch.zeros(*shape, layout.memory_size, device=device)

    @property
    def pages(self) -> EntryNotes:
        """As kernels see them; valid until the pool grows."""
        return EntryNotes(self.position, self.slot, self.sums)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sequence beside its entries."""
        return 4 * self.limits.shape[0] * (2 + self.layout.memory_size)

    def open_row(self, row: int) -> None:
        """Forget what the row's last sequence left."""
        self.limits[:, row] = self.nominal[:, row] = 0
        self.memory[:, row] = torch.nan

    def grow(self, num_blocks: int) -> None:
        """Add blocks up to `num_blocks` in all."""
        more = num_blocks - len(self.position)
        self.position = torch.nn.functional.pad(self.position, (0, 0, 0, more))
        self.slot = None if self.slot is None else torch.nn.functional.pad(self.slot, (0, 0, 0, more))
        self.sums = torch.nn.functional.pad(self.sums, (0, 0, 0, more))

    def compact(self, tables: Tensor, keep: Tensor) -> None:
        """Move the notes of entries that stay together; they lie in the order of age, and so do their keys.

        Args:
            tables: int32 [S, H, M].
            keep: bool [S, H, N], False beyond the length.
        """
        places = places_of(tables, tables.new_full(tables.shape[:2], keep.shape[-1]), keep.shape[-1], self._block_size)
        source = places[keep]
        sequence, head, _ = keep.nonzero(as_tuple=True)
        target = places[sequence, head, (keep.cumsum(-1) - 1)[keep]]
        for note in (self.position, *self.sums):
            note.view(-1)[target] = note.view(-1)[source]


def positions_held(cache: PagedCache, row: int) -> list[list[Tensor]]:
    """List the positions of the tokens that each head of a sequence holds, by layer and head, int64 in ascending order.

    Raises:
        ValueError: the cache keeps no notes of single entries: no policy evicts any, or the model merges tokens.
    """
    if not isinstance(cache.notes, NoteStore) or cache.layout.compression is not None:
        raise ValueError("which tokens are held is only known of a stock model with a policy that evicts, such as H2O")
    lengths, tables = cache.lengths[:, row].long(), cache.block_tables[:, row]
    positions = [gather_pages(cache.notes.position, table[None], int(lengths.max()))[0].cpu() for table in tables]
    return [
        [head[:length].long() for head, length in zip(layer, counts, strict=True)]
        for layer, counts in zip(positions, lengths.tolist(), strict=True)
    ]


def places_of(tables: Tensor, lengths: Tensor, num_entries: int, block_size: int) -> Tensor:
    """Index notes as if their pages were one row: int64 [S, H, num_entries]; the first entry's beyond the length.

    Args:
        tables: int32 [S, H, M].
        lengths: [S, H], at least 1 each.
        num_entries: of the longest head.
        block_size: entries of a block.
    """
    age = torch.arange(num_entries, device=tables.device)
    blocks = tables[..., : -(-num_entries // block_size)].long() * block_size
    places = (blocks[..., None] + torch.arange(block_size, device=tables.device)).flatten(2)[..., :num_entries]
    return places.where(age < lengths[..., None], places[..., :1])


def rewrite_in_order(pages: list[Tensor], slot: Tensor, table: Tensor, lengths: Tensor) -> None:
    """Move the entries of some heads so that each lies at its age; in place.

    Args:
        pages: keys and values, [N, block, D].
        slot: where each entry lies now, int32 [N, block]; becomes its age.
        table: int32 [S, H, M].
        lengths: [S, H].
    """
    num_entries, block_size = int(lengths.max()), slot.shape[1]
    order = gather_pages(slot, table, num_entries).long()
    places = places_of(table, lengths, num_entries, block_size)
    exists = torch.arange(num_entries, device=table.device) < lengths[..., None]
    order = order.where(exists, 0)
    source = places.gather(2, order)[exists]
    target = places[exists]
    for each in pages:
        flat = each.view(-1, each.shape[-1])
        flat[target] = flat[source]
    slot.view(-1)[target] = torch.arange(num_entries, device=table.device).expand_as(order)[exists].to(slot.dtype)
