"""The worker's side of a cache over vLLM's KV memory: rows of requests, tables of heads, a free list on the device.

vLLM's scheduler counts blocks; a block is a credit of one page for each (layer, KV head), and which pages a request has
is decided here, by the kernels, which take them off one stack.
"""

from __future__ import annotations

from collections import deque
from types import ModuleType

import torch
from torch import Tensor

from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch, on_device
from dmc.kernels.layout import CacheLayout
from dmc.runtime.field_store import FieldStore
from dmc.runtime.slow_pool import PendingCopy


class WorkerCache:
    """Serves attention layers as the engine's cache does, for requests that vLLM schedules.

    All but the pages is allocated at once, before vLLM measures what memory is left for these. Nothing waits for the
    device.

    Args:
        layout: shape of this rank's cache, without windows or a policy.
        max_sequences: requests that run at the same time at most.
        block_size: slots of a page.
        max_tokens: length of a request that tables have room for; beyond it they grow.
    """

    def __init__(self, layout: CacheLayout, max_sequences: int, block_size: int, max_tokens: int) -> None:
        self.layout, self.block_size, self._device = layout, block_size, layout.device
        fields = [field for field in layout.fields if field.per == "row" and field.num_layers != 0]
        self.fields = FieldStore(fields, layout.num_layers, max_sequences, 0, block_size, layout.device)
        self.fields.widen("block_tables", -(-max_tokens // block_size))
        self._free_rows = list(range(max_sequences))[::-1]
        self._rows: dict[str, int] = {}
        self._layers: dict[int, LayerCache] = {}
        self._sinks: dict[int, Tensor] = {}
        self._step = 0
        self.is_told = False
        """Whether a message has announced the next forward pass; what vLLM warms up with has no rows here."""
        self._pending: deque[tuple[int, dict[str, int], PendingCopy]] = deque()
        self._reported: tuple[int, dict[str, int]] = 0, {}

    def bind_pages(self, kv_cache: Tensor) -> None:
        """Divide vLLM's memory, contiguous [blocks, layers * heads, slots of a block, 2 D], into pages."""
        self.key_pages, self.value_pages = kv_cache.view(2, -1, self.block_size, self.layout.head_dim).unbind()
        num_pages = len(self.key_pages)
        self.free_pages = torch.arange(num_pages, -1, -1, dtype=torch.int32, device=self._device).roll(-1)
        """Stack of free pages, int32 [N + 1]; the last place is unused."""
        self.num_free = self.free_pages.new_full((1,), num_pages)
        no_row = self.all_lengths.shape[1]
        self.row_of_block = torch.full((len(kv_cache),), no_row, device=self._device)
        """Row of the request whose first block it is, int64 [blocks]."""
        self._layers.clear()

    def begin_step(self, step: int, started: dict[str, int], ended: list[str]) -> None:
        """Take back the pages of requests that have ended, then open rows for others.

        Args:
            step: number of the step, from 1.
            started: first block of each request that begins at position 0.
            ended: finished, aborted and preempted requests.
        """
        self._step, self.is_told = step, True
        if rows := [self._rows.pop(request) for request in ended if request in self._rows]:
            self._give_back(on_device(torch.tensor(rows), self._device))
            self._free_rows += rows
        for request in started:
            self._rows[request] = row = self._free_rows.pop()
            self.fields.open_row(row)
        if started:
            rows = [self._rows[request] for request in started]
            blocks = on_device(torch.tensor([*started.values()]), self._device)
            self.row_of_block[blocks] = on_device(torch.tensor(rows), self._device)

    def _give_back(self, rows: Tensor) -> None:
        """Put the pages of rows, int64 [R], back on the stack."""
        tables, lengths = self.fields["block_tables"][:, rows], self.all_lengths[:, rows]
        is_used = torch.arange(tables.shape[-1], device=self._device) < self._pages_of(lengths)[..., None]
        place = self.num_free + is_used.flatten().cumsum(0) - 1
        unused = len(self.free_pages) - 1
        self.free_pages[place.where(is_used.flatten(), unused)] = tables.flatten()
        self.num_free += is_used.sum().int()
        self.all_lengths[:, rows] = 0

    def _pages_of(self, lengths: Tensor) -> Tensor:
        return (lengths + (self.block_size - 1)) // self.block_size

    @property
    def all_lengths(self) -> Tensor:
        """Slots in pages, int32 [L, C, H]."""
        return self.fields["lengths"]

    @property
    def block_tables(self) -> Tensor:
        """Pages of each head in order, int32 [L, C, H, M]."""
        return self.fields["block_tables"]

    def batch(self, first_blocks: Tensor, begins: Tensor, num_new: list[int], most: list[int]) -> ForwardBatch:
        """Find the rows of a step's sequences, and make tables wide enough; see `AttentionStep`."""
        longest = max(begin + new for begin, new in zip(most, num_new, strict=True))
        if (wanted := -(-longest // self.block_size)) > self.block_tables.shape[-1]:
            self.fields.widen("block_tables", wanted)
            self._layers.clear()
        return ForwardBatch.of_device(num_new, most, self.row_of_block[first_blocks], begins)

    def end_step(self) -> None:
        """Count the pages of all requests after a forward pass."""
        self.is_told = False
        held = self._pages_of(self.all_lengths).sum((0, 2))
        copied = held.to("cpu", non_blocking=True, copy=True)
        event = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._pending.append((self._step, dict(self._rows), PendingCopy(copied, event)))

    def report(self) -> tuple[int, dict[str, int]]:
        """Return the newest step whose counts have arrived, and the pages that each request held after it."""
        arrived = None
        while self._pending and self._pending[0][2].has_arrived:
            arrived = self._pending.popleft()
        if arrived is not None:
            step, rows, copied = arrived
            held = copied.on_host().tolist()
            self._reported = step, {request: held[row] for request, row in rows.items()}
        return self._reported

    def layer(self, index: int) -> LayerCache:
        """Layer `index` as kernels see it; valid until the tables grow."""
        if index not in self._layers:
            names = self.fields.names("row")
            self._layers[index] = LayerCache(
                key_pages=self.key_pages, value_pages=self.value_pages, free_blocks=self.free_pages[:-1],
                num_free=self.num_free, sinks=self._sinks.get(index), entry_metadata={},
                **{name: self.fields[name][index] for name in names},
            )  # fmt: skip
        return self._layers[index]

    def set_sinks(self, index: int, sinks: Tensor | None) -> None:
        """Let a layer's softmax count the sinks of its query heads, see `LayerCache`."""
        if sinks is not None and self._sinks.get(index) is not sinks:
            self._sinks[index] = sinks
            self._layers.pop(index, None)

    def make_room(self, num_new: list[int]) -> None:
        """See `PagedCache.make_room`: vLLM's scheduler has kept pages for the step."""

    def append(self, backend: ModuleType, layer_index: int, batch: ForwardBatch, tokens: NewTokens) -> VisibleKeys:
        """Let tokens into a layer, as the gates decide; say what their queries see."""
        seen: VisibleKeys = backend.append_or_merge(self.layer(layer_index), batch, tokens, self.layout.compression)
        return seen
