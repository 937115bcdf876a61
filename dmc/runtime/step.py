"""One forward pass over the paged cache: new tokens of several sequences in one row, without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from dmc.compression import GateOutput, fixed_decisions, rotate
from dmc.kernels.base import NewTokens
from dmc.policies.attention import GENERATED, CacheAttention, Group, Phase, Place, RotaryTables
from dmc.runtime.paged_cache import PagedCache


class Step:
    """Implements `CompressedCache` for one forward pass; attention layers call it one after the other.

    Args:
        cache: storage; blocks for the worst case are reserved here, before any layer runs.
        attention: how to attend to it.
        rows: cache row of each sequence.
        num_new: new tokens of each sequence, in the order in which they lie in the flat row.
        rotary: position ids [S, n] -> cos, sin [S, n, D] with the borrowed neuron removed; None for stock models.
        phases: what each sequence's tokens are to a policy; None: there is none.
        prompt_ends: where each sequence's prompt ends that is being fed, or was fed last; None: nobody asks.
    Raises:
        OutOfBlocksError: see `PagedCache.reserve`.
    """

    def __init__(
        self,
        cache: PagedCache,
        attention: CacheAttention,
        rows: list[int],
        num_new: list[int],
        rotary: RotaryTables | None,
        phases: list[Phase] | None = None,
        prompt_ends: list[int] | None = None,
    ) -> None:
        self.cache = cache
        self.cache.reserve(rows, num_new)
        self._attention, self._rows, self._num_new = attention, rows, num_new
        self._num_attended = 0
        device, delay = self.cache.layout.device, self.cache.layout.delay
        self._rotary = rotary
        begins, ends = self.cache.tokens_seen[rows].tolist(), prompt_ends or [0] * len(rows)
        places = [Place(*each) for each in zip(rows, begins, ends, strict=True)]
        self.groups = []
        for size, phase, members in members_alike(num_new, phases or [GENERATED] * len(rows)):
            row_index = torch.tensor([rows[i] for i in members])
            positions = self.cache.tokens_seen[row_index][:, None] + torch.arange(-delay, size)
            positions = positions.to(device)
            tables = None if rotary is None else rotary(positions.clamp_min(0))
            index = flat_index(num_new, members, device)
            there = [places[i] for i in members]
            self.groups.append(Group(row_index.to(device), index, positions[:, delay:], there, tables, phase))

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
        """Count the new tokens as seen, after the last layer.

        Raises:
            NotImplementedError: layers of a stock model have not asked this cache.
        """
        if self._rotary is None and self._num_attended < self.cache.layout.num_layers:
            raise NotImplementedError(
                f"{self._num_attended} of the model's {self.cache.layout.num_layers} layers have asked the paged "
                "cache; the others keep another state, or attend in a way of their own, which it does not serve"
            )
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
                merged=self._merged(group, gated),
                omega=group.pick(gated.omega),
                cos=cos,
                sin=sin,
            )
            num_new = group.positions.shape[1]
            query = rotate(group.pick(gated.query), cos[:, -num_new:], sin[:, -num_new:])
            attended = group.put(attended, self._attention.attend(layer_index, group, query, tokens, scaling))
        return attended

    def _merged(self, group: Group, gated: GateOutput) -> Tensor:
        """Decisions of a group's tokens, bool [S, H, n]: the gates', or what follows from the positions."""
        compression = self.cache.layout.compression
        decided = group.pick(gated.alpha) > 0
        if compression is None or compression.decisions != "fixed":
            return decided
        return fixed_decisions(group.positions, compression.target_ratio)[:, None].expand_as(decided)

    def attend_plain(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append every token and attend to all of them; query and key already rotated, [1, heads, N, D].

        Raises:
            NotImplementedError: layers do not come one after the other, or their heads are not the cache's.
        """
        self._check_plain(layer_index, query, key, value)
        attended = torch.empty_like(query)
        for group in self.groups:
            tokens = NewTokens(group.rows, group.positions, group.pick(key), group.pick(value))
            picked = group.pick(query)
            attended = group.put(attended, self._attention.attend(layer_index, group, picked, tokens, scaling))
        return attended

    def _check_plain(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse a layer of a model whose code is not ours unless it is what its configuration promised."""
        layout = self.cache.layout
        if layer_index != self._num_attended:
            raise NotImplementedError(
                f"layer {layer_index} asks the paged cache where layer {self._num_attended} was due: expected every "
                "layer once, one after the other"
            )
        self._num_attended += 1
        heads = (layout.num_kv_heads, layout.head_dim)
        if key.shape[1::2] != heads or value.shape[1::2] != heads or query.shape[-1] != layout.head_dim:
            raise NotImplementedError(
                f"layer {layer_index} has key heads {tuple(key.shape[1::2])}, value heads {tuple(value.shape[1::2])} "
                f"(number, size) and queries of {query.shape[-1]} channels; the cache holds {heads} as the model's "
                "configuration says"
            )


def members_alike(num_new: list[int], phases: list[Phase]) -> list[tuple[int, Phase, list[int]]]:
    """Find sequences that can be fed as one rectangle: (new tokens, phase, indices of the sequences)."""
    kinds = sorted(set(zip(num_new, phases, strict=True)), key=lambda kind: (kind[0], kind[1].value))
    return [
        (size, phase, [i for i, kind in enumerate(zip(num_new, phases, strict=True)) if kind == (size, phase)])
        for size, phase in kinds
    ]


def flat_index(num_new: list[int], members: list[int], device: torch.device) -> Tensor | None:
    """Place of each new token of some sequences in the flat row of a pass, [S, n]; None: they are the row, one each."""
    size = num_new[members[0]]
    if size == 1 and len(members) == len(num_new):
        return None
    starts = torch.tensor([0, *num_new]).cumsum(0)
    return (starts[members][:, None] + torch.arange(size)).to(device)
