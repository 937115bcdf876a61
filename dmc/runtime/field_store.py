"""One store of all tensors of a cache: it allocates, grows, resets and copies the declared fields."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmc.kernels.layout import Field


class FieldStore:
    """Tensors by name; `field_store[name]` is valid until the pool or the rows grow.

    Args:
        fields: the declared fields.
        num_layers: layers that keep a row's field, if it does not say.
        num_rows: number of sequences.
        num_blocks: blocks of the pool.
        block_size: slots of a block.
        device: device of the tensors.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        num_layers: int,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.fields = {field.name: field for field in fields}
        assert len(self.fields) == len(fields), "two fields of the same name"
        self._tensors = {}
        for field in fields:
            lead = (num_layers if field.num_layers is None else field.num_layers, num_rows)
            shape = (*(lead if field.per == "row" else (num_blocks,)), *field.shape_of(block_size))
            states = torch.zeros(shape, dtype=field.dtype, device=device)  # untouched pages take no memory
            self._tensors[field.name] = states if field.start == 0 else states.fill_(field.start)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self, *per: str) -> list[str]:
        """Return the names of fields that are kept per slot, block or row."""
        return [name for name, field in self.fields.items() if field.per in per]

    def grow(self, num_blocks: int) -> None:
        """Add blocks up to a total of `num_blocks`."""
        for name in self.names("slot", "block"):
            old = self._tensors[name]
            self._tensors[name] = old.new_zeros(num_blocks, *old.shape[1:])
            self._tensors[name][: len(old)] = old

    def widen(self, name: str, width: int) -> Tensor:
        """Grow the last dimension of a row's field to at least `width`, and return the field, [rows, ..., width]."""
        missing = width - self._tensors[name].shape[-1]
        if missing > 0:
            start = self.fields[name].start
            self._tensors[name] = torch.nn.functional.pad(self._tensors[name], (0, missing), value=start)
        return self._tensors[name]

    def open_row(self, row: int, states: dict[str, Tensor] | None = None) -> None:
        """Write states, by field, of another row, or reset what the last sequence left, which may be NaN."""
        for name in self.names("row"):
            held = self._tensors[name][:, row]
            held[...] = self.fields[name].start
            if states is not None:  # a field may have been widened since
                held[..., : states[name].shape[-1]] = states[name]

    def read_row(self, row: int) -> dict[str, Tensor]:
        """Copy a row's fields, [layers, ...] each."""
        return {name: self._tensors[name][:, row].clone() for name in self.names("row")}

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the content of blocks to other blocks, int64 [n] each."""
        for name in self.names("slot", "block"):
            self._tensors[name][targets] = self._tensors[name][sources]

    def read_blocks(self, blocks: Tensor, num_slots: Tensor) -> dict[str, Tensor]:
        """Copy the content of blocks, by field of slots or blocks: 0 where no entry of theirs is.

        Args:
            blocks: int64 [n].
            num_slots: entries that each holds, from its first slot on, [n].
        Returns:
            [n, ...] each.
        """
        states = {}
        for name in self.names("slot", "block"):
            held = self._tensors[name][blocks]
            begins = torch.arange(held.shape[1], device=held.device) * self.fields[name].every
            is_empty = begins >= num_slots[:, None]
            states[name] = held.masked_fill_(is_empty.view(*is_empty.shape, *[1] * (held.dim() - 2)), 0)
        return states

    def write_blocks(self, blocks: Tensor, states: dict[str, Tensor]) -> None:
        """Write what `read_blocks` has copied into other blocks, int64 [n]."""
        for name in self.names("slot", "block"):
            self._tensors[name][blocks] = states[name]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, summed over layers."""
        rows = (self._tensors[name][:, 0] for name in self.names("row"))
        return sum(row.numel() * row.element_size() for row in rows)
