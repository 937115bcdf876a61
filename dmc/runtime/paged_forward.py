"""One forward pass over the paged cache: it serves the attention layers, one after the other, stock ones too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dmc.compression import CompressionConfig, DecidedTokens, fixed_decisions, leader_scale, rotate
from dmc.compression.base import RunRecurrent
from dmc.kernels.base import LayerCache, NewTokens
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.recurrent import run_layer
from dmc.policies.layer_attention import CacheAttention
from dmc.runtime.paged_cache import PagedCache

RotaryTables = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Position ids [1, n] -> cos, sin [1, n, D]."""
STOCK_ATTENTION = "dmc_paged"
HARMLESS = {
    "position_ids": "queries and keys are rotated already",
    "output_attentions": "a wish to see the weights, which the engine never has",
    "output_router_logits": "of the model, not of attention",
    "use_cache": "the engine says no: its cache is not the model's",
}
"""Keywords that do not change the attention's result, and why."""


SINKS = ("sink", "sinks")
"""Names of a layer's attention sinks, which it hands on as `s_aux`."""


class WholeLayer(NamedTuple):
    """A layer's cache and the tokens that enter it, as a backend runs the whole layer."""

    cache: LayerCache
    batch: ForwardBatch
    config: CompressionConfig | None
    rotary: tuple[Tensor, Tensor]
    """cos and sin, float32, of the batch's tokens and of those that its gates' delay holds back."""


class PagedForward:
    """Implements `CompressedCache` for one forward pass; attention layers call it one after the other.

    Args:
        cache: the paged cache, with blocks reserved for the worst case.
        attention: appends tokens and attends, by the policy.
        batch: which tokens of which sequences; their RoPE tables are made here.
        rotary: position ids [1, n] -> cos, sin [1, n, D] with the borrowed neuron removed; None for stock models.
        rotate: turns queries, as `dmc.compression.rotate` does.
        writes: whether layers keep what they are fed, beside what `attention` writes.
    """

    def __init__(
        self,
        cache: PagedCache,
        attention: CacheAttention,
        batch: ForwardBatch,
        rotary: RotaryTables | None,
        rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate,
        writes: bool = True,
    ) -> None:
        self.cache, self.batch, self._rotate, self._writes = cache, batch, rotate, writes
        self._attention, self._rotary, self._num_attended = attention, rotary, 0
        self._tables: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        if rotary is not None:
            positions = batch.extended(cache.layout.delay).positions
            cos, sin = rotary(positions.clamp_min(0)[None])
            batch.rotary = cos[0], sin[0]

    @cached_property
    def _unrotated(self) -> ForwardBatch:
        """The batch of layers that do not rotate; what removes the borrowed neuron stays."""
        assert self._rotary is not None and self.batch.rotary is not None
        cos, sin = self._rotary(self.batch.positions.new_zeros(1, 1))
        cos = cos.ne(0).to(cos.dtype)  # without the factor of YaRN
        return self.batch.with_rotary(*(table[0].expand_as(self.batch.rotary[0]).contiguous() for table in (cos, sin)))

    @property
    def position_ids(self) -> Tensor:
        """Position of every new token in its sequence, [1, T]."""
        return self.batch.positions[None]

    def finish(self) -> None:
        """Check, after the last layer, that all layers used the cache.

        Raises:
            NotImplementedError: layers did not use this cache.
        """
        if self._num_attended < len(self.cache.layout.places):
            raise NotImplementedError(
                f"only {self._num_attended} of the model's {len(self.cache.layout.places)} layers use the paged cache: "
                "the engine serves no layers with another state or with their own attention"
            )

    serves_whole_layers = True
    """Whether this pass may let a backend run whole decoder layers."""

    def whole_layer(
        self, layer_index: int, rotary: tuple[Tensor, Tensor], fits: Callable[..., bool]
    ) -> WholeLayer | None:
        """Return what a backend needs to run a whole decoder layer that decodes, as `attend` would; None: it cannot.

        Args:
            layer_index: index of the layer.
            rotary: cos and sin of a stock model, [1, S, D].
            fits: whether the backend serves the layer with its cache and the gates' configuration.
        """
        layout = self.cache.layout
        place = layout.places[layer_index]
        if not self.serves_whole_layers or layout.ranks.size > 1 or layout.window_of(place) is not None:
            return None
        batch = self.batch
        if batch.most_new > 1 or not self._writes or type(self._attention) is not CacheAttention:
            return None
        layer, config = self.cache.layer(place), layout.compression
        if not fits(layer, config):
            return None
        if self._tables is None or self._tables[0] is not rotary[0]:
            given = (rotary[0][0], rotary[1][0]) if batch.rotary is None else batch.rotary
            self._tables = rotary[0], (given[0].float().contiguous(), given[1].float().contiguous())
        self.cache.make_room(batch.num_new)
        self._num_attended += 1
        return WholeLayer(layer, batch, config, self._tables[1])

    def attend(
        self,
        layer_index: int,
        tokens: DecidedTokens,
        scaling: float,
        attention_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `CompressedCache.attend`; batch size 1, all sequences in one flat row."""
        self._num_attended += 1
        batch = self.batch if tokens.rotates else self._unrotated
        compression, place = self.cache.layout.compression, self.cache.layout.places[layer_index]
        self.cache.set_sinks(place, sinks)
        decisions = flat(tokens.decisions)
        if compression is not None and compression.decisions == "fixed":
            decisions = fixed_decisions(batch.positions, compression.target_ratio)[:, None].expand_as(decisions)
        if compression is not None and compression.decided_token == "previous" and self._writes:
            decisions = self._handed_back(place, decisions)
        new = NewTokens(flat(tokens.key), flat(tokens.value), decisions, flat(tokens.omega))
        query = self._rotate(flat(tokens.query), *batch.query_rotary)
        if tokens.query_scale is not None:
            query = query * tokens.query_scale
        if compression is not None and compression.gate_input == "query":
            heads, dim = query.shape[1:]
            query *= leader_scale(heads, dim, self.cache.layout.num_kv_heads, compression.neuron_index, query)
        return self._attention.attend(place, batch, query, new, scaling).transpose(0, 1)[None]

    def _handed_back(self, layer_index: int, decisions: Tensor) -> Tensor:
        """Shift each decision, [T, H], to the token before: in this pass, or the last one that was held back."""
        ring, first = self.cache.layer(layer_index).history_decisions, self.batch.cu_seqlens[:-1]
        ring[self.batch.row_index, :, (self.batch.positions[first] - 1) % ring.shape[-1]] = decisions[first]
        return decisions.roll(-1, 0).index_fill(0, self.batch.last, False)

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
        """See `CompressedCache.attend_plain`; batch size 1, all sequences in one flat row.

        Raises:
            NotImplementedError: layers do not come one after the other, or their heads are not the cache's.
        """
        self._check_plain(layer_index, query, key, value)
        tokens = NewTokens(flat(key), flat(value))
        place = self.cache.layout.places[layer_index]
        self.cache.set_sinks(place, sinks)
        has_window = self.cache.layout.window_of(place) is not None
        attend = self._attention.attend_in_window if has_window else self._attention.attend
        attended = attend(place, self.batch, flat(query), tokens, scaling)
        return attended.transpose(0, 1)[None]

    def run_recurrent(
        self, layer_index: int, run: RunRecurrent, hidden_states: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """See `CompressedCache.run_recurrent`; batch size 1, all sequences in one flat row.

        Raises:
            NotImplementedError: layers do not come one after the other.
        """
        self._take_turn(layer_index)
        cache = self.cache
        place = cache.layout.places[layer_index] - cache.layout.num_paged_layers
        return run_layer(run, hidden_states[0], self.batch, cache.fields, place, writes=self._writes)[None]

    def _take_turn(self, layer_index: int) -> None:
        if layer_index != self._num_attended:
            raise NotImplementedError(
                f"layer {layer_index} asks the paged cache where layer {self._num_attended} was due: expected every "
                "layer once, one after the other"
            )
        self._num_attended += 1

    def _check_plain(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse a stock model's layer whose calls differ from its configuration."""
        layout = self.cache.layout
        self._take_turn(layer_index)
        heads = (layout.num_kv_heads, layout.head_dim)
        if key.shape[1::2] != heads or value.shape[1::2] != heads or query.shape[-1] != layout.head_dim:
            raise NotImplementedError(
                f"layer {layer_index} has key heads {tuple(key.shape[1::2])}, value heads {tuple(value.shape[1::2])} "
                f"(number, size) and queries of {query.shape[-1]} channels; the cache holds {heads} as the model's "
                "configuration says"
            )


def flat(states: Tensor) -> Tensor:
    """View [1, heads, T, ...] as [T, heads, ...]."""
    return states[0].transpose(0, 1)


@torch.compiler.disable
def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    paged_cache: PagedForward | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the engine's cache; query and key are rotated already. No part of compiled layers.

    Args: as transformers gives them to an attention function: query [1, H_q, T, D], key and value [1, H, T, D];
        `paged_cache` is the keyword that the engine adds to the model's own.
    Returns:
        [1, T, H_q, D], and no weights.
    Raises:
        NotImplementedError: the model asks for more than causal attention with the windows of its configuration, or
            does not hand on the cache.
    """
    config: Any = module.config
    if sliding_window is not None and sliding_window >= config.max_position_embeddings:
        sliding_window = None
    if paged_cache is None:
        raise NotImplementedError(
            f"this {config.model_type} model does not hand keywords on to its attention, so that its layers cannot "
            "find the paged cache"
        )
    layout, index = paged_cache.cache.layout, int(module.layer_idx)  # type: ignore[arg-type]
    declared = layout.window_of(layout.places[index])
    asked = {
        "attention_mask": attention_mask,
        "dropout": dropout or None,
        "is_causal": False if is_causal is False else None,
        "sinks": None if s_aux is not None else next((name for name in SINKS if hasattr(module, name)), None),
        "sliding_window": None if sliding_window == declared else str(sliding_window),
        **{name: value for name, value in kwargs.items() if name not in HARMLESS},
    }
    for name, wish in asked.items():
        if wish is not None:
            shown = tuple(wish.shape) if isinstance(wish, Tensor) else wish
            raise NotImplementedError(
                f"layer {index} of this {config.model_type} model asks its attention for {name}={shown}, "
                "which the paged cache does not serve"
            )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = paged_cache.attend_plain(index, query, key, value, scaling, sinks=s_aux)
    return attended.transpose(1, 2).contiguous(), None


@torch.compiler.disable
def stock_recurrent(
    module: nn.Module,
    run: Callable[..., Tensor],
    hidden_states: Tensor,
    paged_cache: PagedForward | None = None,
    **_: Any,
) -> Tensor:
    """Run a stock model's layer without attention from the states in the engine's cache. No part of compiled layers.

    Args:
        module: the layer.
        run: its own forward.
        hidden_states: its input, [1, T, hidden].
        paged_cache: the keyword that the engine adds to the model's own.
    Returns:
        [1, T, hidden].
    Raises:
        NotImplementedError: the model does not hand on the cache.
    """
    index = int(module.layer_idx)  # type: ignore[arg-type]
    if paged_cache is None:
        raise NotImplementedError(f"layer {index} of this model has no attention, and is not handed the paged cache")
    return paged_cache.run_recurrent(index, lambda states, kept: run(states, cache_params=kept), hidden_states)


AttentionInterface.register(STOCK_ATTENTION, stock_attention)
