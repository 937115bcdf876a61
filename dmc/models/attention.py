"""The one attention forward of every compressed model family: project, gate, pool, rotate, attend."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dmc.compression import CompressedCache, Compressor, DecidedTokens, GateMode, GateOutput, GateTrace, rotate
from dmc.models.adapter import GateAdapter
from dmc.models.masked_attention import Documents, causal_attention, delayed_masked_attention
from dmc.ranks import ALONE, Ranks

THRESHOLDED = GateMode()


class CompressedAttentionMixin(nn.Module):
    """Replaces the forward of a Hugging Face attention layer; all parameters keep their names and shapes.

    Training and scoring use the parallel form over whole sequences; with a cache, the same gate output goes to the
    cache's `attend`, which stores and attends as the decisions say.
    """

    compressor: Compressor
    gate_adapter: GateAdapter | None
    layer_idx: int
    head_dim: int
    scaling: float
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    normalizes_heads: ClassVar[bool] = False
    """Whether `q_norm` and `k_norm` normalize each head's queries and keys; the borrowed neuron is read after them."""

    def project(self, hidden_states: Tensor, multiplier: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project [B, T, hidden] to query [B, H_q, T, D], key and value [B, H, T, D], before RoPE.

        Args:
            hidden_states: input of the layer.
            multiplier: factor on the borrowed neuron, before the norms (eq. 13); None: 1.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape)
        if multiplier is not None:
            query, key = self.compressor.phase_out(query, key, multiplier)
        if self.normalizes_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        padding_mask: Tensor | None = None,
        past_key_values: CompressedCache | None = None,
        paged_cache: CompressedCache | None = None,
        gate_mode: GateMode | None = None,
        gate_trace: GateTrace | None = None,
        documents: Documents | None = None,
        context_ranks: Ranks = ALONE,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Run the attention layer as its gates decide.

        Args:
            hidden_states: [B, T, hidden].
            position_embeddings: cos and sin of the new tokens, [B or 1, T, D].
            padding_mask: True at real tokens, [B, past + T]; None: no padding.
            past_key_values: cache of `generate`.
            paged_cache: cache of the engine, in the same role.
            gate_mode: how the gates decide; default thresholded in eval, relaxed in training.
            gate_trace: receives this layer's decisions.
            documents: decisions and attention restart at each (without a cache only).
            context_ranks: processes that divide each sequence: hidden states are those of this one's tokens, all other
                arguments those of whole sequences; between projections and output each has some heads of all tokens.
        """
        mode = gate_mode if gate_mode is not None or self.training else THRESHOLDED
        cache = paged_cache if paged_cache is not None else past_key_values
        multiplier = None if mode is None or cache is not None else mode.neuron_multiplier
        projected = self.project(hidden_states, multiplier)
        query, key, value = (context_ranks.all_to_all(states, 1, 2) for states in projected)
        adapted = None
        if self.gate_adapter is not None:
            adapted = context_ranks.all_to_all(self.gate_adapter.logits(hidden_states), 2, 3)
        if cache is not None:
            tokens = self.compressor.decide(query, key, value, adapted)
            attended = self.attend_cached(cache, tokens, padding_mask)
        elif multiplier is not None:
            attended = self.attend_plain(query, key, value, position_embeddings, multiplier, documents)
            if adapted is not None:
                attended = attended + 0.0 * adapted.sum()  # ddp and DeepSpeed expect a gradient of every weight
        else:
            starts = sequence_starts(query, padding_mask) if documents is None else documents.starts
            gated = self.compressor.gate(query, key, mode, self.layer_idx, starts, adapted)
            if gate_trace is not None:
                gate_trace.record(self.layer_idx, gated)
            hidden = None if padding_mask is None else ~padding_mask
            attended = self.attend_parallel(gated, value, position_embeddings, hidden, documents)
        attended = context_ranks.all_to_all(attended, 2, 1)
        output = self.o_proj(attended.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return output, None

    @torch.compiler.disable
    def attend_cached(self, cache: CompressedCache, tokens: DecidedTokens, padding_mask: Tensor | None) -> Tensor:
        """Attend through a cache; no part of compiled layers, so that all layers share their graphs.

        Args:
            cache: cache of the model.
            tokens: the new ones, with their decisions.
            padding_mask: True at real tokens, [B, past + T]; None: no padding.
        Returns:
            [B, H_q, T, D].
        """
        return cache.attend(self.layer_idx, tokens, self.scaling, padding_mask)

    def attend_plain(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor],
        multiplier: float,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attend causally, unpadded, the borrowed neuron scaled by `multiplier` after RoPE as before it (eq. 13).

        Args:
            query: unrotated queries of `project` with this multiplier, [B, H_q, T, D].
            key: unrotated keys, likewise, [B, H, T, D].
            value: values, [B, H, T, D].
            rotary: cos and sin, [B or 1, T, D].
            multiplier: in [0, 1].
            documents: bounds of documents; None: a sequence is one.
        Returns:
            [B, H_q, T, D].
        """
        scale = self.compressor.neuron_scale(multiplier, query)
        cos, sin = (table * scale for table in rotary)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        query = self.compressor.without_decision(query, key.shape[1], multiplier)
        return causal_attention(query, key, value, self.scaling, documents)

    def attend_parallel(
        self,
        gated: GateOutput,
        value: Tensor,
        rotary: tuple[Tensor, Tensor],
        hidden: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        """Attend over whole sequences to the partial states and raw recent tokens that the gates leave visible.

        Args:
            gated: queries, keys and decisions.
            value: values, [B, H, T, D].
            rotary: cos and sin, [B or 1, T, D].
            hidden: True for keys that no query sees, [B, T]; None: there are none.
            documents: bounds of documents; None: a sequence is one.
        Returns:
            [B, H_q, T, D].
        """
        compressor, config = self.compressor, self.compressor.config
        scale = compressor.neuron_scale(0.0, value)
        cos, sin = (table * scale for table in rotary)
        stream_key, stream_value = compressor.pool(gated, value)
        query = compressor.without_decision(rotate(gated.query, cos, sin), value.shape[1])
        is_raw = config.action == "drop" or not config.delay
        return delayed_masked_attention(
            query,
            None if is_raw else rotate(gated.key, cos, sin),
            None if is_raw else value,
            rotate(stream_key, cos, sin),
            stream_value,
            compressor.log_keep(gated),
            self.scaling,
            delay=config.delay,
            keep_top=config.action == "merge",
            hidden=hidden,
            documents=documents,
        )


def sequence_starts(query: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return True at padding and at the first real token after it, [B, T]: neither may merge into what precedes it."""
    batch, _, length, _ = query.shape
    if padding_mask is None:
        starts = torch.zeros(batch, length, dtype=torch.bool, device=query.device)
        starts[:, 0] = True
        return starts
    return ~(padding_mask & torch.nn.functional.pad(padding_mask[:, :-1], (1, 0)))
