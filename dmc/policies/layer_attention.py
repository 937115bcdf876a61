"""What an attention layer asks of the cache in a forward pass: append the tokens, then attend.

This is attention to all entries; a policy replaces it with its own (`CachePolicy.attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout
from dmc.kernels.reference import as_read
from dmc.kernels.windows import window_attention


class Rotary(Protocol):
    """The model's own RoPE, which turns to other positions what it has rotated already."""

    def turn_queries(self, layer_index: int, query: Tensor, positions: Tensor) -> Tensor:
        """Turn queries [S, heads, n, D] of a layer further by positions [S, n], which may be negative; float32."""

    def turn_keys(self, layer_index: int, key: Tensor, positions: Tensor) -> Tensor:
        """Turn keys, as `turn_queries` does queries."""


class Cache(Protocol):
    """Interface of the engine's cache to a policy."""

    layout: CacheLayout
    block_size: int
    tokens_seen: Tensor
    """Tokens of each cache row before this pass, int64 [C] on the host."""
    fields: Any
    """Tensors by name: see `Field`."""
    slow: Any
    """Pool in the host's memory, if the policy asked for one."""
    scratch_row: int | None
    """Row that fills up recorded batches; None: nothing is recorded."""
    num_unread: int | Tensor
    """Entries that a policy held and left unread, summed over queries, layers and KV heads; on the device."""

    @property
    def block_tables(self) -> Tensor:
        """Blocks of each head in order, int32 [L, C, H, M]."""

    @property
    def lengths(self) -> Tensor:
        """Number of slots in pages, int32 [L, C, H]."""

    def layer(self, index: int) -> LayerCache:
        """Return layer `index` as kernels see it; valid until the pool or the tables grow."""

    def append(self, backend: ModuleType, layer_index: int, batch: ForwardBatch, tokens: NewTokens) -> VisibleKeys:
        """Append (or merge) tokens in a layer; return the keys that their queries see."""

    def append_to_ring(self, backend: ModuleType, layer_index: int, batch: ForwardBatch, tokens: NewTokens) -> None:
        """Write tokens over those that have left the window of a layer."""


class CacheAttention:
    """Appends or merges new tokens as the gates decide, if there are any, and attends to all entries.

    Args:
        cache: the engine's cache.
        backend: kernel module.
    """

    def __init__(self, cache: Cache, backend: ModuleType) -> None:
        self.cache, self.backend = cache, backend
        self.tokens: dict[int, list[int]] = {}
        """Token ids of each sequence in a pass, by cache row: at least up to those of the pass."""
        self.prompts: dict[int, list[tuple[int, int]]] = {}
        """Begin and end of their prompts, one for each turn; those of later turns may be among them."""

    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """Run attention in one layer; sequences with one token go through the kernels of a decode step.

        Args:
            layer_index: index of the layer; layers come in order.
            batch: which tokens of which sequences.
            query: rotated, [T, H_q, D].
            tokens: what enters the cache.
            scaling: factor on the scores.
        Returns:
            [T, H_q, D].
        """

        def attend_part(part: ForwardBatch, where: Tensor | slice) -> Tensor:
            seen = self.append(layer_index, part, tokens.part(where))
            return self.attend_to_all(layer_index, part, query[where], seen, scaling)

        return self.by_part(batch.by_count, query, attend_part)

    def attend_in_window(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """Run attention in a layer with a window, which gates and policies leave alone; see `attend`."""
        window = self.cache.layout.window_of(layer_index)
        assert window is not None

        def attend_part(part: ForwardBatch, where: Tensor | slice) -> Tensor:
            new, attended = tokens.part(where), None
            if part.most_new > 1:
                layer = self.cache.layer(layer_index)
                attended = window_attention(query[where], layer, part, as_read(layer, new), window, scaling)
            self.cache.append_to_ring(self.backend, layer_index, part, new)
            if attended is None:
                options: dict[str, Any] = {"num_scores": self.whole_pages(window), "bias": None}
                attended = self.attend_once(layer_index, part, query[where], scaling, **options)
            return attended

        return self.by_part(batch.by_count, query, attend_part)

    def finish(self, feed: Callable[[list[int], int, int, CacheAttention], None]) -> None:
        """Finish the pass after its last layer, before memory is counted.

        Args:
            feed: runs the model once more, without logits, on given tokens of a cache row from a given position; what
                attends then is the given object, and no layer keeps anything.
        """

    def by_phase(
        self, batch: ForwardBatch, query: Tensor, attend: Callable[[ForwardBatch, Tensor | slice], Tensor]
    ) -> Tensor:
        """Attend from generated tokens, then from prompt tokens, which most policies treat differently.

        Args:
            batch: of both kinds, or one.
            query: rotated, [T, H_q, D].
            attend: called with a part of the batch, and the indices of its tokens in the flat row.
        Returns:
            [T, H_q, D].
        """
        return self.by_part(batch.by_phase, query, attend)

    def by_part(
        self,
        parts: list[tuple[ForwardBatch, Tensor | slice]],
        query: Tensor,
        attend: Callable[[ForwardBatch, Tensor | slice], Tensor],
    ) -> Tensor:
        """Attend from parts of a batch, one after the other, as `by_phase` does."""
        if len(parts) == 1:
            return attend(*parts[0])
        attended = torch.empty_like(query)
        for part, where in parts:
            attended[where] = attend(part, where)
        return attended

    def append(self, layer_index: int, batch: ForwardBatch, tokens: NewTokens) -> VisibleKeys:
        """Append (or merge) tokens in a layer; return the keys that their queries see."""
        return self.cache.append(self.backend, layer_index, batch, tokens)

    def attend_to_all(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, seen: VisibleKeys, scaling: float
    ) -> Tensor:
        """Attend from the new tokens to their visible keys, [T, H_q, D]."""
        if batch.most_new == 1:
            num_scores = None if batch.is_known else self.cache.block_tables.shape[-1] * self.cache.block_size
            options = {"recent": seen.recent, "num_scores": num_scores, "chunk_ends": seen.chunk_ends}
            attended: Tensor = self.attend_once(layer_index, batch, query, scaling, **options)
            return attended
        layer = self.cache.layer(layer_index)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        options = {"sinks": layer.sinks, "bias": layer.bias}
        attended = self.backend.prefill_attention(query, *pages, batch, seen, scaling, layer.scales, **options)
        return attended

    def attend_once(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float, **options: Any) -> Any:
        """Attend from one token of each sequence, [S, H_q, D]; with `return_scores` also [S, H_q, num_scores]."""
        layer = self.cache.layer(layer_index)
        pages, options = (
            (layer.key_pages, layer.value_pages, layer.block_tables),
            {"rows": batch.row_index, "sinks": layer.sinks, "bias": layer.bias, **options},
        )
        return self.backend.paged_attention(query, *pages, layer.lengths, scaling, scales=layer.scales, **options)

    def whole_pages(self, num_slots: int) -> int:
        """Round a number of slots up to whole pages, the width of a kernel's scores."""
        return -(-num_slots // self.cache.block_size) * self.cache.block_size
