"""One forward pass over the paged cache: new tokens of several sequences in one row, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmc.compression import GateOutput, rotate
from dmc.kernels.reference import RawTokens, StreamUpdate
from dmc.runtime.paged_cache import PagedCache

RotaryTables = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Group:
    """Sequences with the same number of new tokens, handled as one rectangle."""

    rows: Tensor
    """Cache rows, [S]."""
    index: Tensor
    """Place of each new token in the flat row of the forward pass, [S, n]."""
    positions: Tensor
    """Positions of raw history and new tokens, negative before the start, [S, R + n]."""
    tables: tuple[Tensor, Tensor] | None
    """cos and sin at `positions`, or None for models that rotate by themselves."""


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
        device, history = cache.layout.device, cache.layout.history_size
        starts = torch.tensor([0, *num_new]).cumsum(0)
        self.groups = []
        for size in sorted(set(num_new)):
            members = [i for i, count in enumerate(num_new) if count == size]
            row_index = torch.tensor([rows[i] for i in members])
            index = starts[members][:, None] + torch.arange(size)
            positions = cache.tokens_seen[row_index][:, None] - history + torch.arange(history + size)
            positions = positions.to(device)
            tables = None if rotary is None else rotary(positions.clamp_min(0))
            self.groups.append(Group(row_index.to(device), index.to(device), positions, tables))

    @property
    def position_ids(self) -> Tensor:
        """Position of every new token in its sequence, [1, N]."""
        flat = torch.empty(sum(self._num_new), dtype=torch.long, device=self.cache.layout.device)
        for group in self.groups:
            flat[group.index] = group.positions[:, self.cache.layout.history_size :]
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
            attended[0][:, group.index] = self._attend_compressed(layer_index, group, gated, value, scaling)
        return attended

    def attend_plain(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append every token and attend to all of them; query and key already rotated, [1, heads, N, D]."""
        attended = torch.empty_like(query)
        for group in self.groups:
            lengths = self.cache.lengths[layer_index, group.rows].long()
            visible = lengths[..., None] + torch.arange(1, group.index.shape[1] + 1, device=lengths.device)
            ones = torch.ones_like(visible, dtype=torch.bool)
            update = StreamUpdate(
                _of_group(key, group), _of_group(value, group), visible - 1, ones, visible, ones[:, 0]
            )
            tables = self._store(layer_index, group, update)
            attended[0][:, group.index] = self.backend.prefill_attention(
                _of_group(query, group), self.cache.key_pages, self.cache.value_pages, tables, visible, scaling
            ).transpose(0, 1)
        return attended

    def _attend_compressed(self, layer: int, group: Group, gated: GateOutput, value: Tensor, scaling: float) -> Tensor:
        cache, config = self.cache, self.cache.layout.compression
        assert config is not None and group.tables is not None
        num_new = group.index.shape[1]
        tokens = self._raw_tokens(layer, group, gated, value)
        lengths = cache.lengths[layer, group.rows].long()
        mean = None if cache.mean is None else cache.mean[layer, group.rows]
        weight = None if cache.weight is None else cache.weight[layer, group.rows]
        update = self.backend.append_or_merge(tokens, num_new, lengths, config, mean, weight)
        tables = self._store(layer, group, update)
        self._remember(layer, group, tokens, update)
        cos, sin = (table[:, -num_new:] for table in group.tables)
        query = rotate(_of_group(gated.query, group), cos, sin)
        visible, recents = update.length, {}
        if config.action == "merge":
            visible = (update.length - 1).clamp_min(0)
        if config.delay > 0:
            recent = tokens.part(tokens.key.shape[2] - num_new - config.delay + 1, tokens.key.shape[2])
            recents = {
                "recent_key": rotate(recent.key, recent.cos, recent.sin),
                "recent_value": recent.value,
                "recent_exists": recent.positions >= 0,
            }
        return self.backend.prefill_attention(
            query,
            cache.key_pages,
            cache.value_pages,
            tables,
            visible,
            scaling,
            top=update if config.action == "merge" else None,
            **recents,
        ).transpose(0, 1)

    def _raw_tokens(self, layer: int, group: Group, gated: GateOutput, value: Tensor) -> RawTokens:
        """Join the raw history of the group's rows, in time order, with the new tokens."""
        cache, size = self.cache, self.cache.layout.history_size
        assert group.tables is not None
        merged, omega = gated.alpha[0][:, group.index] > 0, gated.omega[0][:, group.index]  # [H, S, n]
        key, value = _of_group(gated.key, group), _of_group(value, group)
        merged, omega = merged.transpose(0, 1), omega.transpose(0, 1)
        if size > 0:
            place = group.positions[:, None, :size] % size  # [S, 1, R]
            rows, heads = group.rows[:, None, None], torch.arange(key.shape[1], device=key.device)[None, :, None]

            def past(ring: Tensor) -> Tensor:
                return ring[layer][rows, heads, place]

            key = torch.cat((past(cache.history_key), key), dim=2)
            value = torch.cat((past(cache.history_value), value), dim=2)
            merged = torch.cat((past(cache.history_merged), merged), dim=2)
            omega = torch.cat((past(cache.history_omega), omega), dim=2)
        return RawTokens(key, value, merged, omega, group.positions, *group.tables)

    def _store(self, layer: int, group: Group, update: StreamUpdate) -> Tensor:
        tables = self.cache.extend_tables(layer, group.rows, update.length[..., -1])
        self.backend.write_slots(self.cache.key_pages, self.cache.value_pages, tables, update)
        return tables

    def _remember(self, layer: int, group: Group, tokens: RawTokens, update: StreamUpdate) -> None:
        """Keep the last R raw tokens and the open slot's mean for the next pass."""
        cache, size = self.cache, self.cache.layout.history_size
        if cache.mean is not None and cache.weight is not None:
            assert update.mean is not None and update.weight is not None
            cache.mean[layer, group.rows], cache.weight[layer, group.rows] = update.mean, update.weight
        if size == 0:
            return
        last = tokens.part(tokens.key.shape[2] - size, tokens.key.shape[2])
        place = last.positions[:, None] % size
        rows = group.rows[:, None, None]
        heads = torch.arange(last.key.shape[1], device=rows.device)[None, :, None]
        cache.history_key[layer][rows, heads, place] = last.key
        cache.history_value[layer][rows, heads, place] = last.value
        cache.history_merged[layer][rows, heads, place] = last.merged
        cache.history_omega[layer][rows, heads, place] = last.omega


def _of_group(states: Tensor, group: Group) -> Tensor:
    """Pick a group's tokens out of the flat row: [1, heads, N, D] -> [S, heads, n, D]."""
    return states[0][:, group.index].transpose(0, 1)
