"""Sequences in a cache whose length differs per layer, KV head and sequence: rows, snapshots, shared blocks, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmc.kernels.base import NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout
from dmc.runtime.block_pool import BlockPool
from dmc.runtime.slow_pool import CopyStream, SlowPool
from dmc.runtime.snapshot import Snapshot
from dmc.runtime.tally import Tally


class PagedCache(BlockPool):
    """Sequences, one a row, in a pool of blocks."""

    def __init__(
        self,
        layout: CacheLayout,
        max_sequences: int,
        block_size: int = 16,
        num_blocks: int | None = None,
        recorded_length: int | None = None,
    ):
        super().__init__(layout, max_sequences, block_size, num_blocks, recorded_length)
        self.slow: SlowPool | None = None
        """Entries that lie in the host's memory."""
        if layout.offloaded:
            shape, sizes = (layout.num_kv_heads, 2, layout.head_dim), (layout.num_layers, max_sequences, block_size)
            self.slow = SlowPool(layout.offloaded, shape, layout.dtype, *sizes, CopyStream(layout.device))
        rows = max_sequences + int(recorded_length is not None)
        self.tally = Tally((layout.num_paged_layers, rows, layout.num_kv_heads), block_size, layout.device)
        self.num_unread: int | Tensor = 0
        """See `Cache` of `layer_attention.py`."""
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free_rows)

    def open_row(self, snapshot: Snapshot | None = None, moves: bool = False) -> int:
        """Start an empty sequence, or one that goes on from a snapshot, and return its row.

        It shares the snapshot's blocks, unless that `moves`: then it takes them over.

        Raises:
            OutOfBlocksError: too few blocks are free for copies of those that the sequence may write into.
        """
        states = None if snapshot is None else snapshot.states
        if states is not None:
            tables = states["block_tables"]
            self._widen_tables(tables.shape[-1])
            states = states if moves else {**states, "block_tables": self._share(tables.clone(), states["lengths"])}
            full, rings = states["block_tables"].split([self.layout.num_layers, len(self.layout.rings)])
            width = self.layout.ring_blocks(self.block_size)
            states = {**states, "block_tables": full, "ring_tables": rings[..., :width]}
        row = self._free_rows.pop()
        self.tokens_seen[row] = 0 if snapshot is None else snapshot.tokens_seen
        self.fields.open_row(row, states)
        return row

    def close_row(self, row: int) -> None:
        """End a sequence: its blocks return to the pool, or to those who share them."""
        self.allocator.free(self._owned_blocks(row))
        self._leave_row(row)

    def _leave_row(self, row: int) -> None:
        self.all_lengths[:, row], self.tokens_seen[row] = 0, 0
        if self.slow is not None:
            self.slow.free(row)
        self._free_rows.append(row)
        self.free.count()

    def snapshot(self, row: int, moves: bool = False) -> Snapshot:
        """Hold on to what a sequence holds now; it goes on, unless it `moves`: then its row is closed.

        Raises:
            OutOfBlocksError: too few blocks are free for copies of those that the sequence may write into.
        """
        assert self.slow is None, "what lies in the host's memory is never copied"
        states, tokens_seen = self.read_row(row), int(self.tokens_seen[row])
        width = -(-int(states["lengths"].max()) // self.block_size)
        states["block_tables"] = states["block_tables"][..., :width].clone()
        if moves:
            self._leave_row(row)
        else:
            states["block_tables"] = self._share(states["block_tables"], states["lengths"])
        return Snapshot(tokens_seen, states)

    def read_row(self, row: int) -> dict[str, Tensor]:
        """Copy a sequence's fields, [layers, ...] each; "block_tables" are those of all layers in one."""
        states = self.fields.read_row(row)
        rings = states.pop("ring_tables")
        return {**states, "block_tables": self._joined(states["block_tables"], rings)}

    def _joined(self, tables: Tensor, rings: Tensor) -> Tensor:
        """Join tables of layers without a window, [L, H, M], and of those with one: [layers, H, the larger M]."""
        width = max(tables.shape[-1], rings.shape[-1])
        return torch.cat([pad(part, (0, width - part.shape[-1])) for part in (tables, rings)]) if len(rings) else tables

    def drop(self, snapshot: Snapshot) -> None:
        """Let go of a snapshot's blocks."""
        self.allocator.free(self._blocks_of(snapshot.states["block_tables"], snapshot.states["lengths"]))
        self.free.count()

    def blocks_only_in(self, snapshots: Iterable[Snapshot]) -> int:
        """Blocks that these alone hold."""
        blocks = [self._blocks_of(taken.states["block_tables"], taken.states["lengths"]) for taken in snapshots]
        if not blocks:
            return 0
        held = torch.cat(blocks).bincount(minlength=self.allocator.num_blocks)
        return int(((held > 0) & (held == self.allocator.extra + 1)).sum())

    def blocks_to_share(self, held: int | Snapshot | None = None) -> int:
        """Blocks that one more holder of what a row or snapshot holds needs for itself, at most; under a policy all."""
        if held is not None and self.layout.policy_fields:
            return self.blocks_held(held)
        rings = sum(-(-ring // self.block_size) for ring in self.layout.rings)
        return (self.layout.num_layers + rings) * self.layout.num_kv_heads

    def _share(self, tables: Tensor, lengths: Tensor) -> Tensor:
        """Hold blocks [L, H, M] once more; of those that a holder may write into it gets copies, in place.

        Without a policy that is the block which the next entry goes into, or the last one may change in; of layers with
        a window every block.
        """
        if self.layout.policy_fields:
            closed = torch.zeros_like(lengths)
        elif self.layout.compression is not None and self.layout.compression.action == "merge":
            closed = (lengths - 1).clamp_min(0) // self.block_size
        else:
            closed = lengths // self.block_size
        closed[self.layout.num_layers :] = 0
        index = torch.arange(tables.shape[-1], device=tables.device)
        is_shared = index < closed[..., None]
        is_open = (index < -(-lengths // self.block_size)[..., None]) & ~is_shared
        old = tables[is_open].long()
        fresh = self.take(old.numel())
        self.fields.copy_blocks(old, fresh.long())
        self.allocator.share(tables[is_shared])
        tables[is_open] = fresh
        self.free.count()
        return tables

    def reset(self) -> None:
        """End every sequence, whatever state an interrupted forward pass has left behind."""
        self.allocator.reset()
        self.all_lengths.zero_()
        self.tokens_seen.zero_()
        self._free_rows = list(range(len(self.tokens_seen) - 1, -1, -1))
        if self.slow is not None:
            for row in self._free_rows:
                self.slow.free(row)
        # this rank may have failed alone, so the others are asked later; pools that grow are not equally large
        self.free.note(0, torch.arange(len(self.tokens_seen)))

    def _owned_blocks(self, rows: int | list[int]) -> Tensor:
        tables = self._joined(self.fields["block_tables"][:, rows], self.fields["ring_tables"][:, rows])
        return self._blocks_of(tables, self.all_lengths[:, rows])

    def _blocks_of(self, tables: Tensor, lengths: Tensor) -> Tensor:
        return tables[torch.arange(tables.shape[-1], device=tables.device) < -(-lengths[..., None] // self.block_size)]

    def blocks_held(self, held: int | Snapshot) -> int:
        """Blocks of a row or snapshot, shared ones too; the most of any rank."""
        lengths = held.states["lengths"] if isinstance(held, Snapshot) else self.all_lengths[:, held]
        return self.layout.ranks.all_reduce(int((-(-lengths // self.block_size)).sum()), "max")

    def append(self, backend: ModuleType, layer_index: int, batch: ForwardBatch, tokens: NewTokens) -> VisibleKeys:
        """Let tokens into a layer, as the gates decide if there are any; say what their queries see."""
        self.make_room(batch.num_new)
        seen: VisibleKeys = backend.append_or_merge(self.layer(layer_index), batch, tokens, self.layout.compression)
        self.tally.count(layer_index, batch, seen)
        return seen

    def append_to_ring(self, backend: ModuleType, layer_index: int, batch: ForwardBatch, tokens: NewTokens) -> None:
        """Write tokens over those that have left the window of a layer."""
        window = self.layout.window_of(layer_index)
        assert window is not None
        self.make_room([min(new, window) for new in batch.num_new])
        seen = VisibleKeys(backend.append_to_ring(self.layer(layer_index), batch, tokens, window))
        self.tally.count(layer_index, batch, seen)

    def slots(self, row: int) -> Tensor:
        """Entries held by each head of all ranks, raw recent tokens included, int64 [L, H]; see `lengths`."""
        recent = min(int(self.tokens_seen[row]), self.layout.delay)
        elsewhere = 0 if self.slow is None else self.slow.not_in_pages(row)[:, None]
        return self.layout.ranks.all_gather(self.lengths[:, row].long().cpu(), -1) + recent + elsewhere

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence beside its pages: raw history, means, lengths, tables, states, what a policy keeps."""
        return self.fields.row_bytes

    def bytes_allocated(self, *rows: int) -> int:
        """Bytes on all ranks: whole pages, those that rows share once, tables and state, in fast memory and slow."""
        slow = 0 if self.slow is None else sum(map(self.slow.bytes_allocated, rows))
        return self.layout.ranks.all_reduce(self._bytes_fast(rows) + slow)

    def bytes_fast(self, *rows: int) -> int:
        """Of `bytes_allocated`, those on the cache's device."""
        return self.layout.ranks.all_reduce(self._bytes_fast(rows))

    def _bytes_fast(self, rows: Sequence[int]) -> int:
        return self._owned_blocks([*rows]).unique().numel() * self.block_bytes + len(rows) * self.state_bytes

    def bytes_used(self, row: int) -> int:
        """Bytes of a sequence's slots and state on all ranks, without the unused rest of its last pages."""
        slots = int(self.all_lengths[:, row].sum())
        slow = 0 if self.slow is None else self.slow.bytes_used(row)
        return self.layout.ranks.all_reduce(slots * self.block_bytes // self.block_size + self.state_bytes + slow)
