"""Cache entries offloaded to the host's memory, packed by token for runs of layers, and asynchronous copies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dmc.runtime.allocator import BlockAllocator

FIRST_BLOCKS = 64


@dataclass
class PendingCopy:
    """An asynchronous copy, possibly unfinished."""

    states: Tensor
    event: torch.cuda.Event | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether `on_host` would not wait."""
        return self.event is None or self.event.query()

    def on_host(self) -> Tensor:
        """Wait for the copy and return it for reading on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.states

    def on_device(self) -> Tensor:
        """Make later work of the device wait for the copy, and return it."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.states.device)
            stream.wait_event(self.event)
            self.states.record_stream(stream)
        return self.states


class CopyStream:
    """Copies concurrently with the computation, through pinned memory; on a CPU nothing is copied.

    Args:
        device: device of the cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty_on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a source for `to_device`, pinned where that helps."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, states: Tensor) -> PendingCopy:
        """Start a copy from the device."""
        if self._stream is None:
            return PendingCopy(states)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = self.empty_on_host(tuple(states.shape), states.dtype).copy_(states, non_blocking=True)
            states.record_stream(self._stream)
            return PendingCopy(host, self._stream.record_event())

    def to_device(self, states: Tensor) -> PendingCopy:
        """Start a copy from the host."""
        if self._stream is None:
            return PendingCopy(states)
        with torch.cuda.stream(self._stream):
            copied = states.to(self._device, non_blocking=True)
            return PendingCopy(copied, self._stream.record_event())


class SlowPool:
    """Keys and values of some layers in the host's memory, in blocks under one table for each sequence.

    The layers of a run are stored together, token by token, so that one gather fetches tokens for all of them.

    Args:
        runs: layers of each run, by name.
        entry_shape: shape of one token of one layer, [H, 2, D].
        dtype: dtype of keys and values.
        num_layers: layers of the model.
        max_sequences: number of rows.
        block_size: tokens of a block.
        copy_stream: copies to and from the device.
    """

    def __init__(
        self,
        runs: dict[int, list[int]],
        entry_shape: tuple[int, int, int],
        dtype: torch.dtype,
        num_layers: int,
        max_sequences: int,
        block_size: int,
        copy_stream: CopyStream,
    ) -> None:
        self.tokens = torch.zeros(num_layers, max_sequences, dtype=torch.long)
        """Number of first tokens of each sequence that are here, [L, C]."""
        self.room = torch.zeros_like(self.tokens)
        """Number of slots in pages for those of them that are read, [L, C]."""
        self.entry_bytes = math.prod(entry_shape) * dtype.itemsize
        """Bytes of one token of one layer."""
        self._copy_stream, self._block_size = copy_stream, block_size
        self._place = {layer: (run, i) for run, layers in runs.items() for i, layer in enumerate(layers)}
        num_slots = FIRST_BLOCKS * block_size
        self._packed = {
            run: torch.zeros(num_slots, len(layers), *entry_shape, dtype=dtype) for run, layers in runs.items()
        }
        self._allocator = BlockAllocator(FIRST_BLOCKS)
        self._tables: list[Tensor] = [torch.zeros(0, dtype=torch.long) for _ in range(max_sequences)]
        self._pending: list[tuple[PendingCopy, int, Tensor]] = []  # unfinished copies to the host, with layer and slots

    @property
    def num_blocks(self) -> int:
        """Number of blocks, free ones included."""
        return self._allocator.num_blocks

    def not_in_pages(self, row: int) -> Tensor:
        """Return the number of a sequence's entries that each head of a layer holds only here, int64 [L]."""
        return self.tokens[:, row] - self.room[:, row]

    def bytes_allocated(self, row: int) -> int:
        """Bytes of a row's blocks."""
        return len(self._tables[row]) * self._block_size * len(self._place) * self.entry_bytes

    def bytes_used(self, row: int) -> int:
        """Bytes of a row's blocks without the unused rest of the last ones."""
        return int(self.tokens[:, row].sum()) * self.entry_bytes

    def free(self, row: int) -> None:
        """Free a row's blocks; may be called twice."""
        self._settle()
        self._allocator.free(self._tables[row].int())
        self._tables[row] = self._tables[row][:0]
        self.tokens[:, row] = self.room[:, row] = 0

    def write(self, layer_index: int, row: int, begin: int, key: Tensor, value: Tensor) -> None:
        """Start copying keys and values [H, n, D] of the tokens from `begin` on; the next read waits for them."""
        self._settle()
        end = begin + key.shape[1]
        self.tokens[layer_index, row] = end
        missing = -(-end // self._block_size) - len(self._tables[row])
        if missing > 0:
            if missing > self._allocator.num_free:
                self._grow(missing)
            self._tables[row] = torch.cat((self._tables[row], self._allocator.allocate(missing).long()))
        packed = torch.stack((key, value), dim=2).transpose(0, 1).contiguous()  # [n, H, 2, D]
        self._pending.append(
            (self._copy_stream.to_host(packed), layer_index, self._slots(row, torch.arange(begin, end)))
        )

    def read(self, layer_index: int, row: int, end: int) -> tuple[Tensor, Tensor]:
        """Copy a layer's keys and values of the first `end` tokens to the device, [H, end, D] each."""
        self._settle()
        run, place = self._place[layer_index]
        packed = self._packed[run][self._slots(row, torch.arange(end)), place]
        states = self._copy_stream.to_device(packed).on_device()
        return states[:, :, 0].transpose(0, 1), states[:, :, 1].transpose(0, 1)

    def fetch(self, run: int, rows: list[int], positions: list[Tensor]) -> PendingCopy:
        """Start copying given tokens of some rows to the device, for all layers of a run: one gather and one copy.

        Returns:
            [tokens of all rows, layers, H, 2, D].
        """
        self._settle()
        slots = torch.cat([self._slots(row, tokens) for row, tokens in zip(rows, positions, strict=True)])
        held = self._packed[run]
        packed = self._copy_stream.empty_on_host((len(slots), *held.shape[1:]), held.dtype)
        return self._copy_stream.to_device(torch.index_select(held, 0, slots, out=packed))

    def _slots(self, row: int, positions: Tensor) -> Tensor:
        return self._tables[row][positions // self._block_size] * self._block_size + positions % self._block_size

    def _settle(self) -> None:
        """Write finished copies into the pool."""
        for copy, layer_index, slots in self._pending:
            run, place = self._place[layer_index]
            self._packed[run][slots, place] = copy.on_host()
        self._pending.clear()

    def _grow(self, missing: int) -> None:
        total = max(2 * self._allocator.num_blocks, self._allocator.num_blocks + missing)
        for run, held in self._packed.items():
            self._packed[run] = held.new_zeros(total * self._block_size, *held.shape[1:])
            self._packed[run][: len(held)] = held
        self._allocator.grow(total)
