"""Pages and block tables of a cache, and the room in them: what fits, what is free, a pool that grows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dmc.kernels.base import LayerCache
from dmc.kernels.layout import CacheLayout
from dmc.runtime.allocator import BlockAllocator, OutOfBlocksError
from dmc.runtime.field_store import FieldStore
from dmc.runtime.free_blocks import FreeBlocks

FIRST_POOL_BLOCKS = 256


class BlockPool:
    """Pages shared by all layers, heads and sequences; one block table per (layer, sequence, KV head).

    The pool grows on demand when `num_blocks` is None. All tensors of a row are allocated, used or not. Where steps are
    recorded, what fills a batch up writes into a scratch row, whose heads share one more block.
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
        self.tokens_seen = torch.zeros(max_sequences, dtype=torch.long)
        self._layers: dict[int, LayerCache] = {}
        self._sinks: dict[int, Tensor] = {}
        self.place = -1
        """Changes whenever tensors of the cache have moved."""
        self._move()
        self._grows_by_layer, self._room = False, 0
        self.free = FreeBlocks(layout, self.allocator, block_size, max_sequences)

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

    def surely_fits(self, rows: Tensor, length: int) -> bool:
        """Whether feeding one token to each row, of up to `length` then, fits without asking or moving anything."""
        has_room = not self.layout.num_layers or length <= self.block_tables.shape[-1] * self.block_size
        return self.free.left_after(rows, 1) >= 0 and has_room

    def take(self, num_blocks: int) -> Tensor:
        """Take free blocks, int32 [num_blocks], see `BlockAllocator.allocate`; a pool that grows makes them."""
        if (missing := num_blocks - self.allocator.num_free) > 0:
            self._grow_pool(missing)
        return self.allocator.allocate(num_blocks)

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

    def _widen_tables(self, wanted: int) -> None:
        if wanted > (width := self.fields["block_tables"].shape[-1]):
            self.fields.widen("block_tables", max(wanted, 2 * width))
            self._move()

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
