"""The paged cache behind `model.generate()`: padding stays outside, so a batch equals its sequences one by one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from typing_extensions import override

from dmc.compression import DecidedTokens
from dmc.compression.base import RunRecurrent
from dmc.kernels import choose_backend
from dmc.kernels.batch import ForwardBatch
from dmc.policies.layer_attention import CacheAttention
from dmc.runtime.model_view import layout_of
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.paged_forward import PagedForward


class PagedGenerationCache(Cache):
    """Transformers' `Cache` over a `PagedCache`; compressed attention layers call its `attend`.

    Args:
        model: a compressed causal LM.
        block_size: entries per page.
    """

    def __init__(self, model: Any, block_size: int = 16) -> None:
        super().__init__(layers=[])
        self._layout, self._rotary, self._block_size = layout_of(model), model.rotary_tables, block_size
        layout = self._layout
        self._backend = choose_backend("auto", layout.dtype, layout.head_dim, block_size, layout.device)
        self._forward: PagedForward | None = None
        self._real: Tensor | None = None
        self._num_columns = 0
        self._rows: list[int] = []
        self.paged: PagedCache | None = None
        """The paged cache, None before the first forward pass."""

    @override
    def attend(
        self,
        layer_index: int,
        tokens: DecidedTokens,
        scaling: float,
        attention_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        forward, real = self._pass(layer_index, tokens.value, attention_mask)
        flat = copy.copy(tokens)
        for name in ("query", "key", "value", "decisions", "omega"):
            setattr(flat, name, _flatten(getattr(tokens, name), real))
        attended = forward.attend(layer_index, flat, scaling, sinks=sinks)
        return self._padded(layer_index, tokens.query.transpose(1, 2), attended[0].transpose(0, 1)).transpose(1, 2)

    def attend_plain(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        attention_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `CompressedCache`."""
        forward, real = self._pass(layer_index, value, attention_mask)
        flat_query, key, value = (_flatten(states, real) for states in (query, key, value))
        attended = forward.attend_plain(layer_index, flat_query, key, value, scaling, sinks=sinks)
        return self._padded(layer_index, query.transpose(1, 2), attended[0].transpose(0, 1)).transpose(1, 2)

    def run_recurrent(
        self, layer_index: int, run: RunRecurrent, hidden_states: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """See `CompressedCache`."""
        forward, real = self._pass(layer_index, hidden_states, attention_mask)
        output = forward.run_recurrent(layer_index, run, hidden_states[real][None])
        return self._padded(layer_index, hidden_states, output[0])

    def _pass(self, layer_index: int, states: Tensor, attention_mask: Tensor | None) -> tuple[PagedForward, Tensor]:
        """Return the present pass, which the first layer begins, and which tokens are real, bool [B, T].

        Args:
            layer_index: index of the layer.
            states: any of [B, ..., T, channels].
            attention_mask: see `CompressedCache.attend`.
        """
        if layer_index == 0:
            self._begin(len(states), states.shape[-2], states.device, attention_mask)
        assert self._forward is not None and self._real is not None
        return self._forward, self._real

    def _padded(self, layer_index: int, like: Tensor, flat: Tensor) -> Tensor:
        """Put a layer's output, [N, ...], among the padding, [B, T, ...] as `like`; the last layer ends the pass."""
        assert self._forward is not None and self._real is not None and self.paged is not None
        output = torch.zeros_like(like)
        output[self._real] = flat
        if layer_index == len(self._layout.places) - 1:
            self._forward.finish()
            self.paged.tokens_seen[self._forward.batch.rows] += torch.tensor(self._forward.batch.num_new)
            self._num_columns += like.shape[1]
        return output

    def _begin(self, batch: int, num_new: int, device: torch.device, attention_mask: Tensor | None) -> None:
        if self.paged is None:
            self.paged = PagedCache(self._layout, batch, self._block_size)
            self._rows = [self.paged.open_row() for _ in range(batch)]
        if attention_mask is None:
            self._real = torch.ones(batch, num_new, dtype=torch.bool, device=device)
        else:
            self._real = attention_mask[:, -num_new:].bool()
        counts = self._real.sum(-1).tolist()
        rows = [row for row, count in zip(self._rows, counts, strict=True) if count]
        begins, counts = self.paged.tokens_seen[rows].tolist(), [count for count in counts if count]
        self.paged.reserve(rows, counts)
        new = ForwardBatch(rows, begins, counts, self._layout.device)
        self._forward = PagedForward(self.paged, CacheAttention(self.paged, self._backend), new, self._rotary)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return the new tokens as they are: a layer with a window stores them when it attends, by `attend_plain`.

        Raises:
            TypeError: the layer has none: only compressed attention layers can use this cache.
        """
        if self._layout.window_of(self._layout.places[layer_idx]) is None:
            raise TypeError(
                "a stock layer called update() of a compressed model's cache: give it a cache of transformers"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns fed so far, padding included: logical tokens, not slots."""
        return self._num_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the column of the first new token."""
        return self._num_columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of the keys that a padding mask covers."""
        return self._num_columns + query_length, 0

    @property
    def is_compileable(self) -> bool:
        """Never: shapes follow the decisions."""
        return False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue from the cache of row `beam_idx[i]` (beam search)."""
        if self.paged is not None:
            snapshots = [self.paged.snapshot(row, moves=True) for row in self._rows]
            self._rows = [self.paged.open_row(snapshots[i]) for i in beam_idx.tolist()]
            for snapshot in snapshots:
                self.paged.drop(snapshot)

    def crop(self, max_length: int) -> None:
        """Refuse: merged tokens cannot be rolled back, so assisted decoding does not work."""
        raise NotImplementedError("a compressed cache cannot be cropped: use generate() without an assistant model")


def _flatten(states: Tensor, real: Tensor) -> Tensor:
    """Drop padding: [B, heads, T, ...] -> [1, heads, N, ...], sequences one after the other."""
    return states.transpose(1, 2)[real].transpose(0, 1)[None]
