"""One forward pass over the paged cache: new tokens of several sequences in one row, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmc.compression import GateOutput, rotate
from dmc.kernels.base import NewTokens
from dmc.runtime.paged_cache import PagedCache

RotaryTables = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Group:
    """Sequences with the same number of new tokens, handled as one rectangle."""

    rows: Tensor
    """Cache rows, [S]."""
    index: Tensor | None
    """Place of each new token in the flat row of the pass, [S, n]; None: the flat row is the group, with n = 1."""
    positions: Tensor
    """[S, n]."""
    tables: tuple[Tensor, Tensor] | None
    """cos and sin at the n + W positions that end with the last new token's; None: the model rotates by itself."""

    def pick(self, states: Tensor) -> Tensor:
        """Take the group's tokens out of the flat row: [1, heads, N, ...] -> [S, heads, n, ...]."""
        if self.index is None:
            return states[0].transpose(0, 1).unsqueeze(2)
        return states[0][:, self.index].transpose(0, 1)

    def put(self, flat: Tensor, states: Tensor) -> Tensor:
        """Lay [S, heads, n, D] back into the flat row [1, heads, N, D]."""
        if self.index is None:
            return states.squeeze(2).transpose(0, 1)[None]
        flat[0][:, self.index] = states.transpose(0, 1)
        return flat


class Step:
    """Implements `CompressedCache` for one forward pass; attention layers call it one after the other.

    Args:
        cache: storage; blocks for the worst case are reserved here, before any layer runs.
        backend: kernel module.
        rows: cache row of each sequence.
        num_new: new tokens of each sequence, in the order in which they lie in the flat row.
        rotary: position ids [S, n] -> cos, sin [S, n, D] with the borrowed neuron removed; None for stock models.
    Raises:
        OutOfBlocksError: see `PagedCache.reserve`.
    """

    def __init__(
        self, cache: PagedCache, backend: ModuleType, rows: list[int], num_new: list[int], rotary: RotaryTables | None
    ) -> None:
        cache.reserve(rows, num_new)
        self.cache, self.backend = cache, backend
        self._rows, self._num_new = rows, num_new
        device, delay = cache.layout.device, cache.layout.delay
        starts = torch.tensor([0, *num_new]).cumsum(0)
        self.groups = []
        for size in sorted(set(num_new)):
            members = [i for i, count in enumerate(num_new) if count == size]
            row_index = torch.tensor([rows[i] for i in members])
            alone = size == 1 and len(members) == len(rows)
            index = None if alone else (starts[members][:, None] + torch.arange(size)).to(device)
            positions = cache.tokens_seen[row_index][:, None] + torch.arange(-delay, size)
            positions = positions.to(device)
            tables = None if rotary is None else rotary(positions.clamp_min(0))
            self.groups.append(Group(row_index.to(device), index, positions[:, delay:], tables))

    @property
    def position_ids(self) -> Tensor:
        """Position of every new token in its sequence, [1, N]."""
        if self.groups[0].index is None:
            return self.groups[0].positions.view(1, -1)
        flat = torch.empty(sum(self._num_new), dtype=torch.long, device=self.cache.layout.device)
        for group in self.groups:
            flat[group.index] = group.positions
        return flat[None]

    def finish(self) -> None:
        """Count the new tokens as seen, after the last layer."""
        self.cache.tokens_seen[self._rows] += torch.tensor(self._num_new)

    def attend(
        self, layer_index: int, gated: GateOutput, value: Tensor, scaling: float, attention_mask: Tensor | None = None
    ) -> Tensor:
        """See `CompressedCache.attend`; batch size 1, all sequences in one row."""
        attended = torch.empty_like(gated.query)
        for group in self.groups:
            assert group.tables is not None
            cos, sin = group.tables
            tokens = NewTokens(
                rows=group.rows,
                positions=group.positions,
                key=group.pick(gated.key),
                value=group.pick(value),
                merged=group.pick(gated.alpha) > 0,
                omega=group.pick(gated.omega),
                cos=cos,
                sin=sin,
            )
            num_new = group.positions.shape[1]
            query = rotate(group.pick(gated.query), cos[:, -num_new:], sin[:, -num_new:])
            attended = group.put(attended, self._attend(layer_index, query, tokens, scaling))
        return attended

    def attend_plain(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append every token and attend to all of them; query and key already rotated, [1, heads, N, D]."""
        attended = torch.empty_like(query)
        for group in self.groups:
            tokens = NewTokens(group.rows, group.positions, group.pick(key), group.pick(value))
            attended = group.put(attended, self._attend(layer_index, group.pick(query), tokens, scaling))
        return attended

    def _attend(self, layer_index: int, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        self.cache.make_room(query.shape[0], query.shape[2])
        layer = self.cache.layer(layer_index)
        seen = self.backend.append_or_merge(layer, tokens, self.cache.layout.compression)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        if query.shape[2] > 1:
            return self.backend.prefill_attention(query, *pages, seen, scaling, rows=tokens.rows)
        attended = self.backend.paged_attention(
            query[:, :, 0], *pages, layer.lengths, scaling, rows=tokens.rows, recent=seen.recent
        )
        return attended[:, :, None]
