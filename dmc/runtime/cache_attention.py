"""What an attention layer asks of the cache for sequences that are fed alike: let tokens in, then attend."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmc.kernels.base import NewTokens, Seen
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.sequence import GENERATED, Phase


@dataclass(frozen=True)
class Place:
    """Where one sequence stands, known without asking the device."""

    row: int
    """Its cache row."""
    begin: int
    """Position of its first new token."""
    prompt_end: int
    """Where the prompt ends that is being fed, or was fed last."""


@dataclass
class Group:
    """Sequences with the same number of new tokens, handled as one rectangle."""

    rows: Tensor
    """Cache rows, [S]."""
    index: Tensor | None
    """Place of each new token in the flat row of the pass, [S, n]; None: the flat row is the group, with n = 1."""
    positions: Tensor
    """[S, n]."""
    places: list[Place]
    """Where each sequence stands."""
    tables: tuple[Tensor, Tensor] | None
    """cos and sin at the n + W positions that end with the last new token's; None: the model rotates by itself."""
    phase: Phase = GENERATED
    """What the tokens are to a policy."""

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


class CacheAttention:
    """Lets new tokens in as the gates decide, if there are any, and attends to all that is held.

    Args:
        cache: storage.
        backend: kernel module.
    """

    def __init__(self, cache: PagedCache, backend: ModuleType) -> None:
        self.cache, self.backend = cache, backend

    def attend(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """Feed one layer.

        Args:
            layer_index: which one; layers come in order.
            group: the sequences.
            query: rotated, [S, H_q, n, D].
            tokens: what enters the cache.
            scaling: factor on the scores.
        Returns:
            [S, H_q, n, D].
        """
        return self.attend_to_all(layer_index, group, query, self.append(layer_index, tokens), scaling)

    def append(self, layer_index: int, tokens: NewTokens) -> Seen:
        """Let tokens into a layer; say what their queries see."""
        self.cache.make_room(tokens.key.shape[0], tokens.key.shape[2])
        seen = self.backend.append_or_merge(self.cache.layer(layer_index), tokens, self.cache.layout.compression)
        self.cache.tally.count(layer_index, tokens.rows, tokens.positions, seen)
        return seen

    def attend_to_all(self, layer_index: int, group: Group, query: Tensor, seen: Seen, scaling: float) -> Tensor:
        """Attend to what the new tokens' queries see, [S, H_q, n, D]."""
        layer = self.cache.layer(layer_index)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        if query.shape[2] > 1:
            return self.backend.prefill_attention(query, *pages, seen, scaling, rows=group.rows)
        attended = self.backend.paged_attention(
            query[:, :, 0], *pages, layer.lengths, scaling, rows=group.rows, recent=seen.recent
        )
        return attended[:, :, None]


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
