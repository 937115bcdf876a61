"""OmniKV-prefill: for each chunk of a prompt, filter layers choose what sparse layers read of the tokens before it."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from dmc.kernels.base import LayerCache, Seen
from dmc.kernels.probabilities import attention_probabilities
from dmc.policies.omnikv import OmniKV, selection_scores, selector_weights
from dmc.policies.reading import top_positions
from dmc.runtime.cache_attention import Group, Place
from dmc.runtime.policy.reading import small_page_ids, small_pages

Pages = tuple[Tensor, Tensor, Tensor]
"""Keys and values, [N, block, D] each, and the tables of S sequences, int32 [S, H, M]."""


class SparsePrefill:
    """Reads prompts in chunks (OmniKV-prefill); exact while what came before a chunk is no longer than what it reads.

    Args:
        policy: how long chunks are and how much they read.
        backend: kernel module that serves pages of one entry.
    """

    def __init__(self, policy: OmniKV, backend: ModuleType) -> None:
        self._policy, self._backend = policy, backend
        self._chosen: dict[int, list[Tensor]] = {}  # of the latest filter layer: by row, positions for each chunk

    def choose(self, layer: LayerCache, group: Group, query: Tensor, scaling: float) -> None:
        """Choose for every chunk, by all of its queries alike; the new tokens are in the layer already."""
        for place, rows, own in zip(group.places, group.rows.split(1), query.split(1), strict=True):
            chosen = []
            for begin, chunk in self._chunks(place, own):
                chosen.append(self._choose(layer, rows, begin, chunk, scaling))
            self._chosen[place.row] = chosen

    def attend(self, pages: Pages, places: list[Place], query: Tensor, scaling: float) -> Tensor:
        """Attend in a sparse layer from each chunk to what was chosen for it and to its own tokens, [S, H_q, n, D]."""
        key_pages, value_pages, tables = pages
        block_size, attended = key_pages.shape[1], []
        for place, table, own in zip(places, tables.split(1), query.split(1), strict=True):
            parts = []
            for (begin, chunk), chosen in zip(self._chunks(place, own), self._chosen[place.row], strict=True):
                step = torch.arange(chunk.shape[2], device=query.device)
                positions = torch.cat((chosen, begin + step))
                slots = (len(chosen) + 1 + step).expand(1, table.shape[1], -1)
                parts.append(
                    self._backend.prefill_attention(
                        chunk,
                        small_pages(key_pages, 1),
                        small_pages(value_pages, 1),
                        small_page_ids(table, positions[None, None], block_size),
                        Seen(slots),
                        scaling,
                    )
                )
            attended.append(torch.cat(parts, dim=2))
        return torch.cat(attended)

    def _chunks(self, place: Place, query: Tensor) -> list[tuple[int, Tensor]]:
        """Cut the new tokens' queries: (position of the first, [1, H_q, <= chunk, D])."""
        size = self._policy.chunk
        return [(place.begin + i * size, chunk) for i, chunk in enumerate(query.split(size, dim=2))]

    def _choose(self, layer: LayerCache, rows: Tensor, begin: int, chunk: Tensor, scaling: float) -> Tensor:
        """Return the positions before `begin` that a chunk reads, ascending."""
        count = self._policy.chunks_read * self._policy.chunk
        if begin <= count:
            return torch.arange(begin, device=rows.device)
        slots = torch.full((1, layer.lengths.shape[1], chunk.shape[2]), begin, device=rows.device)
        scores = torch.zeros(1, begin, device=rows.device)
        for block in attention_probabilities(chunk, layer, rows, slots, scaling):
            ages = torch.zeros(1, block.shape[3], dtype=torch.long, device=rows.device)
            scores += selection_scores(block.flatten(1, 2), selector_weights(ages, "uniform"))
        return top_positions(scores, torch.tensor([count], device=rows.device), count)[0]
