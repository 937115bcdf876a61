"""What an attention layer asks of the cache for sequences that are fed alike: let tokens in, then attend.

Here to all that is held; a policy puts its own in place of it (`CachePolicy.attention`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dmc.kernels.base import LayerCache, NewTokens, Seen
from dmc.kernels.layout import CacheLayout

RotaryTables = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Position ids [S, n] -> cos, sin [S, n, D]."""


class Phase(enum.Flag):
    """What tokens that are fed together are to a policy."""

    PROMPT = enum.auto()
    """Tokens of a prompt; no sign: generated ones."""
    FIRST = enum.auto()
    """The prompt's first token is among them."""
    LAST = enum.auto()
    """The prompt's last token is among them."""


GENERATED = Phase(0)


class Cache(Protocol):
    """What a policy may ask of the engine's cache."""

    layout: CacheLayout
    block_size: int
    tokens_seen: Tensor
    """By row, before this pass, int64 [C] on the host."""
    fields: Any
    """Tensors by name: see `Field`."""
    slow: Any
    """The pool in the host's memory, if the policy asked for one."""

    @property
    def block_tables(self) -> Tensor:
        """Blocks of each head in order, int32 [L, C, H, M]."""

    @property
    def lengths(self) -> Tensor:
        """Slots in pages, int32 [L, C, H]."""

    def layer(self, index: int) -> LayerCache:
        """Layer `index` as kernels see it; valid until the pool or the tables grow."""

    def append(self, backend: ModuleType, layer_index: int, tokens: NewTokens) -> Seen:
        """Let tokens into a layer; say what their queries see."""


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

    @property
    def prompt_ends(self) -> Tensor:
        """Where each sequence's prompt ends, what came before it included, int64 [S]."""
        return torch.tensor([place.prompt_end for place in self.places], device=self.rows.device)

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

    def __init__(self, cache: Cache, backend: ModuleType) -> None:
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
        return self.cache.append(self.backend, layer_index, tokens)

    def attend_to_all(self, layer_index: int, group: Group, query: Tensor, seen: Seen, scaling: float) -> Tensor:
        """Attend to what the new tokens' queries see, [S, H_q, n, D]."""
        if query.shape[2] == 1:
            return self.attend_once(layer_index, group, query, scaling, recent=seen.recent)
        layer = self.cache.layer(layer_index)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        attended: Tensor = self.backend.prefill_attention(query, *pages, seen, scaling, rows=group.rows)
        return attended

    def attend_once(self, layer_index: int, group: Group, query: Tensor, scaling: float, **options: Any) -> Any:
        """Attend from one token of each sequence, [S, H_q, 1, D]; with `return_scores` also [S, H_q, num_scores]."""
        layer = self.cache.layer(layer_index)
        pages, options = (layer.key_pages, layer.value_pages, layer.block_tables), {"rows": group.rows, **options}
        answer = self.backend.paged_attention(query[:, :, 0], *pages, layer.lengths, scaling, **options)
        return (answer[0][:, :, None], answer[1]) if isinstance(answer, tuple) else answer[:, :, None]

    def whole_pages(self, num_slots: int) -> int:
        """Round slots up to whole pages, as the scores of a kernel are laid out."""
        return -(-num_slots // self.cache.block_size) * self.cache.block_size
