"""Storage of a cache whose length differs per layer, KV head and sequence: fields, block tables, bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout
from dmc.runtime.allocator import BlockAllocator, OutOfBlocksError
from dmc.runtime.field_store import FieldStore
from dmc.runtime.free_blocks import FreeBlocks
from dmc.runtime.slow_pool import CopyStream, SlowPool
from dmc.runtime.snapshot import Snapshot
from dmc.runtime.tally import Tally

FIRST_POOL_BLOCKS = 256


class PagedCache:
    """Pages shared by all layers, heads and sequences; one block table per (layer, sequence, KV head).

    Rows are sequences. The pool grows on demand when `num_blocks` is None. All tensors of a row are allocated, used or
    not. Where steps are recorded, what fills a batch up writes into a scratch row, whose heads share one more block.
    """

    def __init__(
        self,
        layout: CacheLayout,
        max_sequences: int,
        block_size: int = 16,
        num_blocks: int | None = None,
        recorded_length: int | None = None,
    ):
        self.layout, self.block_size, self.grows = layout, block_size, num_blocks is None
        self.allocator = BlockAllocator(FIRST_POOL_BLOCKS if num_blocks is None else num_blocks, layout.device)
        self.scratch_row = None if recorded_length is None else max_sequences
        more = int(recorded_length is not None)
        size = layout.num_layers, max_sequences + more
        self.fields = FieldStore(layout.fields, *size, self.allocator.num_blocks + more, block_size, layout.device)
        self.fields.widen("ring_tables", layout.ring_blocks(block_size))
        if num_blocks is not None and recorded_length is not None:
            fitting = num_blocks * self.expected_ratio / (max(layout.num_layers, 1) * layout.num_kv_heads)
            self.fields.widen("block_tables", math.ceil(min(recorded_length / block_size, fitting)))
        self.slow: SlowPool | None = None
        """Entries that lie in the host's memory."""
        if layout.offloaded:
            shape, sizes = (layout.num_kv_heads, 2, layout.head_dim), (layout.num_layers, max_sequences, block_size)
            self.slow = SlowPool(layout.offloaded, shape, layout.dtype, *sizes, CopyStream(layout.device))
        self.tokens_seen = torch.zeros(max_sequences, dtype=torch.long)
        shape = layout.num_paged_layers, size[1], layout.num_kv_heads
        self.tally = Tally(shape, block_size, layout.device)
        self._layers: dict[int, LayerCache] = {}
        self._sinks: dict[int, Tensor] = {}
        self.place = -1
        """Changes whenever tensors of the cache have moved."""
        self.num_unread: int | Tensor = 0
        """See `Cache` of `layer_attention.py`."""
        self._move()
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._grows_by_layer, self._room = False, 0
        self.free = FreeBlocks(layout, self.allocator, block_size, max_sequences)

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free_rows)

    @property
    def block_tables(self) -> Tensor:
        """Blocks of each head in order, int32 [L, C, H, M]: of layers without a window, as a policy counts them."""
        return self.fields["block_tables"]

    @property
    def lengths(self) -> Tensor:
        """Slots in pages of layers without a window, int32 [L, C, H]."""
        return self.all_lengths[: self.layout.num_layers]

    @property
    def all_lengths(self) -> Tensor:
        """Slots in pages of all layers with attention, those with a window last, int32 [layers, C, H]."""
        return self.fields["lengths"]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all that is kept for its slots included."""
        return self.layout.block_bytes(self.block_size)

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

    def take(self, num_blocks: int) -> Tensor:
        """Take free blocks, int32 [num_blocks], see `BlockAllocator.allocate`; a pool that grows makes them."""
        if (missing := num_blocks - self.allocator.num_free) > 0:
            self._grow_pool(missing)
        return self.allocator.allocate(num_blocks)

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

    def layer(self, index: int) -> LayerCache:
        """Layer `index` as kernels see it; valid until the pool or the tables grow."""
        if index not in self._layers:
            self._layers[index] = self._view(index)
        return self._layers[index]

    def _view(self, index: int) -> LayerCache:
        fields, of_policy = self.fields, {field.name for field in self.layout.policy_fields}
        apart = of_policy | {field.name for field in self.layout.state_fields} | {"ring_tables"}
        return LayerCache(
            free_blocks=self.allocator.stack,
            num_free=self.allocator.height,
            sinks=self._sinks.get(index),
            entry_metadata={name: fields[name] for name in fields.names("slot") if name in of_policy},
            **{name: fields[name] for name in fields.names("slot") if name not in of_policy},
            **{name: self._of_layer(name, index) for name in fields.names("row") if name not in apart},
        )

    def set_sinks(self, index: int, sinks: Tensor | None) -> None:
        """Let a layer's softmax count the sinks of its query heads, see `LayerCache`; those of the model itself."""
        if sinks is not None and self._sinks.get(index) is not sinks:
            self._sinks[index] = sinks
            self._layers.pop(index, None)

    def _of_layer(self, name: str, index: int) -> Tensor:
        """Return a layer's part of a row's field; layers with a window have nothing to remember beside their pages."""
        if name == "block_tables" and index >= self.layout.num_layers:
            return self.fields["ring_tables"][index - self.layout.num_layers]
        states = self.fields[name]
        return states[index] if index < len(states) else states.new_empty(0)

    def fits(self, rows: list[int], num_new: list[int], others: int = 0) -> bool:
        """Whether feeding `num_new[i]` tokens to each row, and taking `others`, leaves none short.

        Every token is taken to be appended. The device is asked only when what was known of it does not settle this.
        """
        return self.grows or self.free.missing(self.all_lengths, rows, num_new, others) <= 0

    def would_grow(self, rows: list[int], num_new: list[int]) -> bool:
        """Whether a pool that grows would on some rank, if all of these tokens were appended; asked as by `fits`."""
        return self.grows and bool(rows) and self.free.missing(self.all_lengths, rows, num_new, 0) > 0

    def tokens_that_fit(self, rows: list[int], num_new: list[int]) -> int:
        """Tokens of one more sequence that fit beside all that, at least 1 that may not."""
        self.free.count()
        left = self.free.known - self.free.needed(self.all_lengths[:, rows], num_new)
        return max(left // (self.layout.num_paged_layers * self.layout.num_kv_heads) * self.block_size, 1)

    @property
    def expected_ratio(self) -> float:
        """Compression ratio of the pages that the gates were trained for; 1 without, or while a policy sees prompts."""
        gates = None if self.layout.policy_fields else self.layout.compression
        return 1.0 if gates is None else gates.target_ratio

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence is expected to hold of so many tokens, at the expected ratio."""
        return self.layout.most_blocks(num_tokens, self.block_size, self.expected_ratio)

    def has_free(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, on every rank; the device is asked as by `fits`."""
        if self.grows or num_blocks <= self.free.at_least:
            return True
        self.free.count()
        return num_blocks <= self.free.known

    def blocks_held(self, held: int | Snapshot) -> int:
        """Blocks of a row or snapshot, shared ones too; the most of any rank."""
        lengths = held.states["lengths"] if isinstance(held, Snapshot) else self.all_lengths[:, held]
        return self.layout.ranks.all_reduce(int((-(-lengths // self.block_size)).sum()), "max")

    def surely_fits(self, rows: Tensor, length: int) -> bool:
        """Whether feeding one token to each row, of up to `length` then, fits without asking or moving anything."""
        has_room = not self.layout.num_layers or length <= self.block_tables.shape[-1] * self.block_size
        return self.free.left_after(rows, 1) >= 0 and has_room

    def reserve(self, rows: list[int] | Tensor, num_new: list[int] | Tensor) -> None:
        """Make sure that a forward pass over these tokens cannot run out of blocks or of table space halfway.

        A pool that grows does so layer by layer when a prompt is fed, in `make_room`: room for all layers uncompressed
        would defeat the compression. The host counts down what is free at least.

        Raises:
            OutOfBlocksError: the pool is fixed and has too few free blocks; nothing has changed.
        """
        num_new = torch.as_tensor(num_new)
        self._grows_by_layer = self.grows and int(num_new.max()) > 1
        if self._grows_by_layer:
            self._room, self.free.known = self.free.at_least, 0
        else:
            missing = self.free.missing(self.all_lengths, rows, num_new, 0)
            if missing > 0:
                self._grow_pool(missing)
                self.free.count()
        self.free.fed_since[rows] += num_new
        most_tokens = int((self.tokens_seen[rows] + num_new).max()) if self.layout.num_layers else 0
        self._widen_tables(-(-most_tokens // self.block_size))

    def _widen_tables(self, wanted: int) -> None:
        if wanted > (width := self.fields["block_tables"].shape[-1]):
            self.fields.widen("block_tables", max(wanted, 2 * width))
            self._move()

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

    def make_room(self, num_new: list[int]) -> None:
        """Let a pool that grows hold so many more tokens of each of some sequences in one layer.

        Decoding sequences ask too, beside a prompt. The device is asked only when that many blocks could be lacking.
        """
        if not self._grows_by_layer:
            return
        wanted = self.layout.num_kv_heads * sum(-(-count // self.block_size) for count in num_new)
        if wanted > self._room:
            self._room = self.allocator.num_free
            if wanted > self._room:
                before = self.allocator.num_blocks
                self._grow_pool(wanted - self._room)
                self._room += self.allocator.num_blocks - before
        self._room -= wanted

    def _grow_pool(self, missing: int) -> None:
        if not self.grows:
            raise OutOfBlocksError(
                f"{missing} more blocks may be needed than the {self.allocator.num_free} of "
                f"{self.allocator.num_blocks} that are free"
            )
        total = max(2 * self.allocator.num_blocks, self.allocator.num_blocks + missing)
        self.fields.grow(total + (self.scratch_row is not None))
        self.allocator.grow(total)
        self._move()

    def _move(self) -> None:
        self._layers.clear()
        self.place += 1
        if self.scratch_row is not None:
            for name in ("block_tables", "ring_tables"):
                self.fields[name][:, self.scratch_row, :, :1] = self.allocator.num_blocks

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
