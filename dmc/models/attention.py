"""The one attention forward of every compressed model family: project, gate, pool, rotate, attend.

What distinguishes families is read off the stock layer: its projections, its norms, its rotation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmc.compression import (
    CompressedCache,
    CompressionConfig,
    Compressor,
    DecidedTokens,
    GateMode,
    GateTrace,
    rotate,
)
from dmc.compression.full_attention import rotates_full_layers
from dmc.models.adapter import GateAdapter
from dmc.models.masked_attention import Documents, causal_attention, delayed_masked_attention
from dmc.models.rotation import Rotation
from dmc.ranks import ALONE, Ranks, local_part

THRESHOLDED = GateMode()
HALVES = Rotation(neighbors=False, repeats=False)


class AttentionStates(NamedTuple):
    """What attention over whole sequences reads, and what the losses do; query, keys and values for its products."""

    query: Tensor
    """Rotated, [B, H_q, T, D]."""
    stream_key: Tensor
    """Partial states after a merge, raw ones before a drop; rotated, [B, H, T, D]."""
    stream_value: Tensor
    """Likewise, [B, H, T, D]."""
    recent_key: Tensor | None
    """Raw keys of a merge with a delay, rotated, [B, H, T, D]."""
    recent_value: Tensor | None
    """Likewise, [B, H, T, D]."""
    log_keep: Tensor
    """Biases of the stream, float32 [B, H, T]."""
    alpha: Tensor
    """Decisions, float32 [B, H, T]."""
    logits: Tensor
    """Decision logits, float32 [B, H, T], which no loss reads: without a gradient."""
    output_gate: Tensor | None
    """Before its sigmoid, [B, T, H_q D]; None: there is none."""


class CompressedAttentionMixin(nn.Module):
    """Replaces the forward of a Hugging Face attention layer; all parameters keep their names and shapes.

    Training and scoring use the parallel form over whole sequences; with a cache, the same gate output goes to the
    cache's `attend`, which stores and attends as the decisions say.
    """

    config: Any
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    qkv_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    query_layernorm: Any
    key_layernorm: Any
    attn_sub_norm: nn.Module
    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    scaling: float
    modeling: ClassVar[ModuleType]
    """Module of the stock layer, with the functions it calls."""
    rotation: ClassVar[Rotation]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        compression = CompressionConfig.from_dict(config.compression)
        self.compressor = Compressor(compression, self.head_dim)
        self.gate_adapter = (
            GateAdapter(config.hidden_size, config.num_key_value_heads) if compression.has_adapter else None
        )
        norm = getattr(self, "q_norm", None)
        self.normalizes = norm is not None or hasattr(self, "query_layernorm")
        self.normalizes_together = norm is not None and norm.weight.shape[-1] != self.head_dim
        queries = 0 if (projection := getattr(self, "q_proj", None)) is None else projection.weight.shape[0]
        self.gates_output = queries == 2 * config.num_attention_heads * self.head_dim
        self.rotates = bool(getattr(self, "use_rope", True)) and rotates_full_layers(config)

    normalizes: bool
    """Whether queries and keys are normalized; the borrowed neuron is read after that."""
    normalizes_together: bool
    """Whether one norm is over all heads together; else each head has its own."""
    rotates: bool
    """Whether queries and keys are rotated by their positions."""
    gates_output: bool
    """Whether W_q also gives each head a gate, D rows behind those of its query; its sigmoid scales the output."""

    def project(
        self, hidden_states: Tensor, rotated: int, multiplier: float | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Project [B, T, hidden] to query [B, H_q, T, D], key and value [B, H, T, D], before RoPE, and output gate.

        Args:
            hidden_states: input of the layer.
            rotated: channels of a head that RoPE turns; all are returned in the order by halves, see `Rotation`.
            multiplier: factor on the borrowed neuron, before the norms (eq. 13); None: 1.
            positions: of the tokens, [B or 1, T]; needed where queries are scaled by them.
        Returns:
            Query, key, value, and the output gate before its sigmoid, [B, T, H_q D], or None.
        """
        *projected, output_gate = self._projected(hidden_states)
        query, key, value = (states.unflatten(-1, (-1, self.head_dim)) for states in projected if states is not None)
        if multiplier is not None:
            place = self.compressor.config.neuron_index
            channel = self.rotation.channel(place, self.head_dim, rotated)
            query, key = self.compressor.phase_out(query, key, multiplier, channel)
        query, key = self._normalized(query, key)
        if (bound := getattr(self.config, "clip_qkv", None)) is not None:
            query, key, value = (states.clamp(-bound, bound) for states in (query, key, value))
        query, key = self.rotation.by_halves(query, rotated), self.rotation.by_halves(key, rotated)
        if self._position_beta is not None:
            query = query * self._position_scale(positions).to(query.dtype)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), output_gate

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if (fused := getattr(self, "qkv_proj", None)) is not None:
            projected = fused(hidden_states)
            of_keys = projected.shape[-1] // (self.num_key_value_groups + 2)
            query, key, value = projected.split((projected.shape[-1] - 2 * of_keys, of_keys, of_keys), -1)
            return query, key, value, None
        query, output_gate = self.q_proj(hidden_states), None
        if self.gates_output:
            query, output_gate = (part.flatten(-2) for part in query.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2))
        return query, self.k_proj(hidden_states), self.v_proj(hidden_states), output_gate

    def _normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize [B, T, heads, D]; of a norm behind RoPE all but its weights, which RoPE does not commute with."""
        if not self.normalizes:
            return query, key
        if hasattr(self, "query_layernorm"):
            query, key = (
                F.rms_norm(states.float(), (self.head_dim,), eps=norm.variance_epsilon).to(states.dtype)
                for states, norm in ((query, self.query_layernorm), (key, self.key_layernorm))
            )
            return query, key
        if self.normalizes_together:
            query, key = (
                norm(states.flatten(-2)).view_as(states) for states, norm in ((query, self.q_norm), (key, self.k_norm))
            )
            return query, key
        return self.q_norm(query), self.k_norm(key)

    @property
    def is_plain(self) -> bool:
        """Whether W_q, W_k and W_v, gates, RoPE by halves of all channels, attention and W_o are all of the layer."""
        beside = ("qkv_proj", "attn_sub_norm", "sinks")
        more = self.normalizes or self.gates_output or any(hasattr(self, name) for name in beside)
        scales = getattr(self.config, "clip_qkv", None) is not None or self._position_beta is not None
        return self.rotates and self.rotation == HALVES and not (more or scales)

    @property
    def _position_beta(self) -> float | None:
        """How fast queries grow with their positions, as Llama 4's."""
        return (self.config.rope_parameters or {}).get("llama_4_scaling_beta")

    def _position_scale(self, positions: Tensor | None) -> Tensor:
        """Return the factor on queries at their positions, [B or 1, T, 1, 1], by the family's own function."""
        scale: Tensor = self.modeling.get_llama_4_attn_scale(
            positions, self._position_beta, self.config.rope_parameters["original_max_position_embeddings"]
        )
        return scale.transpose(1, 2)

    @property
    def query_scale(self) -> Tensor | None:
        """Factor on rotated queries, [D], for the weights of both norms behind RoPE; None: there are none."""
        if not hasattr(self, "query_layernorm"):
            return None
        return local_part(self.query_layernorm.weight) * local_part(self.key_layernorm.weight)

    def rotate_query(self, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries, [B, H_q, T, D]."""
        scale = self.query_scale
        return rotate(query, cos, sin) if scale is None else rotate(query, cos, sin) * scale

    def rotary_tables(self, rotary: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Turn the family's cos and sin, [B or 1, T, R], into this layer's in the order by halves, [B or 1, T, D]."""
        cos, sin = self.rotation.tables(rotary, self.head_dim, dtype)
        return (cos, sin) if self.rotates else (torch.ones_like(cos), torch.zeros_like(sin))

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
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Run the attention layer as its gates decide.

        Args:
            hidden_states: [B, T, hidden].
            position_embeddings: the family's cos and sin of the new tokens, [B or 1, T, R].
            padding_mask: True at real tokens, [B, past + T]; None: no padding.
            past_key_values: cache of `generate`.
            paged_cache: cache of the engine, in the same role.
            gate_mode: how the gates decide; default thresholded in eval, relaxed in training.
            gate_trace: receives this layer's decisions.
            documents: decisions and attention restart at each (without a cache only).
            context_ranks: processes that divide each sequence: hidden states are those of this one's tokens, all other
                arguments those of whole sequences; between projections and output each has some heads of all tokens.
            position_ids: [B or 1, T].
        """
        mode = gate_mode if gate_mode is not None or self.training else THRESHOLDED
        cache = paged_cache if paged_cache is not None else past_key_values
        position_embeddings = self.rotation.whole(position_embeddings)
        positions = None if position_ids is None else context_ranks.chunk(position_ids, 1)
        sinks = getattr(self, "sinks", None)
        sinks = None if sinks is None else context_ranks.chunk(local_part(sinks), 0)
        given = (hidden_states, position_embeddings, positions)
        if cache is None and (mode is None or mode.neuron_multiplier is None):
            starts = (
                sequence_starts(hidden_states, padding_mask, context_ranks) if documents is None else documents.starts
            )
            noise = None if mode is None or mode.noise is None else mode.noise.of_layer(self.layer_idx)
            states = self.states(*given, starts, mode, noise, self.layer_idx, context_ranks)
            if gate_trace is not None:
                gate_trace.record(self.layer_idx, states)
            hidden = None if padding_mask is None else ~padding_mask
            skip_below = THRESHOLDED.skip_below if mode is None else mode.skip_below
            attended = self.attend_parallel(states, hidden, documents, sinks, skip_below)
            output_gate = states.output_gate
        else:
            multiplier = None if mode is None or cache is not None else mode.neuron_multiplier
            query, key, value, adapted, output_gate = self.decided(*given, multiplier, context_ranks)
            if cache is not None:
                tokens = self.compressor.decide(query, key, value, adapted)
                tokens.rotates, tokens.query_scale = self.rotates, self.query_scale
                attended = self.attend_cached(cache, tokens, padding_mask, sinks)
            else:
                assert multiplier is not None
                rotary = self.rotary_tables(position_embeddings, hidden_states.dtype)
                attended = self.attend_plain(query, key, value, rotary, multiplier, documents, sinks)
                if adapted is not None:
                    attended = attended + 0.0 * adapted.sum()  # ddp and DeepSpeed expect a gradient of every weight
        attended = context_ranks.all_to_all(attended, 2, 1)
        output = attended.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        if output_gate is not None:
            output = output * output_gate.sigmoid()
        if hasattr(self, "attn_sub_norm"):
            output = self.attn_sub_norm(output)
        return self.o_proj(output), None

    def decided(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        positions: Tensor | None,
        multiplier: float | None,
        context_ranks: Ranks,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Project to query, key and value of all tokens and this rank's heads, what adapters say, and the output gate.

        See `project` and `forward`; adapters say nothing to attention without gates that needs no gradient.
        """
        products = hidden_states.to(product_dtype(hidden_states))  # once for all projections
        rotated = position_embeddings[0].shape[-1]
        *projected, output_gate = self.project(products, rotated, multiplier, positions)
        query, key, value = (context_ranks.all_to_all(states, 1, 2) for states in projected if states is not None)
        adapted = None
        if self.gate_adapter is not None and (multiplier is None or torch.is_grad_enabled()):
            adapted = context_ranks.all_to_all(self.gate_adapter.logits(hidden_states), 2, 3)
        return query, key, value, adapted, output_gate

    def states(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        positions: Tensor | None,
        starts: Tensor,
        mode: GateMode | None,
        noise: Tensor | None,
        layer_index: int = 0,
        context_ranks: Ranks = ALONE,
    ) -> AttentionStates:
        """Compute all that attention over whole sequences reads, in the dtype of its products.

        Args:
            hidden_states: see `forward`.
            position_embeddings: likewise, with as many columns as channels rotate.
            positions: likewise.
            starts: True at first tokens, [B, T].
            mode: see `forward`.
            noise: of the decisions, float32 [B, H, T]; None: see `Compressor.gate`.
            layer_index: likewise.
            context_ranks: see `forward`.
        """
        compressor, config = self.compressor, self.compressor.config
        given = (hidden_states, position_embeddings, positions)
        query, key, value, adapted, output_gate = self.decided(*given, None, context_ranks)
        gated = compressor.gate(query, key, mode, layer_index, starts, adapted, noise)
        scale = compressor.neuron_scale(0.0, value)
        cos, sin = (table * scale for table in self.rotary_tables(position_embeddings, hidden_states.dtype))
        stream_key, stream_value = compressor.pool(gated, value)
        query = compressor.without_decision(self.rotate_query(gated.query, cos, sin), value.shape[1])
        recent = None
        if config.action == "merge" and config.delay:
            recent = rotate(gated.key, cos, sin), value
        dtype = product_dtype(query)
        return AttentionStates(
            query.to(dtype),
            rotate(stream_key, cos, sin).to(dtype),
            stream_value.to(dtype),
            None if recent is None else recent[0].to(dtype),
            None if recent is None else recent[1].to(dtype),
            compressor.log_keep(gated),
            gated.alpha,
            gated.logits.detach(),
            output_gate,
        )

    @torch.compiler.disable
    def attend_cached(
        self, cache: CompressedCache, tokens: DecidedTokens, padding_mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend through a cache; no part of compiled layers, so that all layers share their graphs.

        Args:
            cache: cache of the model.
            tokens: the new ones, with their decisions.
            padding_mask: True at real tokens, [B, past + T]; None: no padding.
            sinks: of this rank's heads, [H_q]; None: there are none.
        Returns:
            [B, H_q, T, D].
        """
        return cache.attend(self.layer_idx, tokens, self.scaling, padding_mask, sinks)

    def attend_plain(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor],
        multiplier: float,
        documents: Documents | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend causally, unpadded, the borrowed neuron scaled by `multiplier` after RoPE as before it (eq. 13).

        Args:
            query: unrotated queries of `project` with this multiplier, [B, H_q, T, D].
            key: unrotated keys, likewise, [B, H, T, D].
            value: values, [B, H, T, D].
            rotary: cos and sin, [B or 1, T, D].
            multiplier: in [0, 1].
            documents: bounds of documents; None: a sequence is one.
            sinks: of this rank's heads, [H_q]; None: there are none.
        Returns:
            [B, H_q, T, D].
        """
        scale = self.compressor.neuron_scale(multiplier, query)
        cos, sin = (table * scale for table in rotary)
        query, key = self.rotate_query(query, cos, sin), rotate(key, cos, sin)
        query = self.compressor.without_decision(query, key.shape[1], multiplier)
        return causal_attention(query, key, value, self.scaling, documents, sinks)

    def attend_parallel(
        self,
        states: AttentionStates,
        hidden: Tensor | None,
        documents: Documents | None,
        sinks: Tensor | None,
        skip_below: float | None = THRESHOLDED.skip_below,
    ) -> Tensor:
        """Attend over whole sequences to the partial states and raw recent tokens that the gates leave visible.

        Args:
            states: queries, keys, values and biases.
            hidden: True for keys that no query sees, [B, T]; None: there are none.
            documents: bounds of documents; None: a sequence is one.
            sinks: of this rank's heads, [H_q]; None: there are none.
            skip_below: of `GateMode`.
        Returns:
            [B, H_q, T, D].
        """
        config = self.compressor.config
        return delayed_masked_attention(
            states.query,
            states.recent_key,
            states.recent_value,
            states.stream_key,
            states.stream_value,
            states.log_keep,
            self.scaling,
            delay=config.delay,
            keep_top=config.action == "merge",
            hidden=hidden,
            documents=documents,
            sinks=sinks,
            skip_below=skip_below,
        )


def product_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which products of these states are computed: their own, or autocast's."""
    device = states.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts and states.dtype != torch.float64 else states.dtype


def sequence_starts(hidden_states: Tensor, padding_mask: Tensor | None, context_ranks: Ranks = ALONE) -> Tensor:
    """Return True at padding and at the first real token after it, [B, T]: neither may merge into what precedes it."""
    batch, length = hidden_states.shape[0], hidden_states.shape[1] * context_ranks.size
    if padding_mask is None:
        starts = torch.zeros(batch, length, dtype=torch.bool, device=hidden_states.device)
        starts[:, 0] = True
        return starts
    return ~(padding_mask & torch.nn.functional.pad(padding_mask[:, :-1], (1, 0)))
