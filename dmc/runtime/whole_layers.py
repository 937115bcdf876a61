"""Decoder layers like Llama's, each run by the backend in one call while a pass only decodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from dmc.compression import CompressionConfig
from dmc.kernels.base import NO_WEIGHTS, LayerCache, LayerWeights
from dmc.runtime.layer_code import has_code, is_linear, is_llama_mlp, rotates_as_llama, weights_of

PROJECTIONS, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
GATES = ("hidden", "per_head", "own")
"""Gates that the backend evaluates by itself: what they read, who decides, and about which token."""


def is_whole(layer: nn.Module) -> bool:
    """Whether a decoder layer, of a stock model or a compressed one, does what Llama's does."""
    if not has_code(layer, llama.LlamaDecoderLayer.forward):
        return False
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    norms = [layer._modules.get(name) for name in ("input_layernorm", "post_attention_layernorm")]
    if attention is None or mlp is None or not is_llama_mlp(mlp):
        return False
    if not all(norm is not None and has_code(norm, llama.LlamaRMSNorm.forward) for norm in norms):
        return False
    linears = [attention._modules.get(name) for name in PROJECTIONS] + [mlp._modules.get(name) for name in MLP]
    if not all(map(is_linear, linears)):
        return False
    if hasattr(attention, "compressor"):
        return bool(attention.is_plain) and "forward" not in attention.__dict__
    stock = llama.LlamaAttention.forward, mistral.MistralAttention.forward, qwen2.Qwen2Attention.forward
    return any(has_code(attention, forward) for forward in stock) and rotates_as_llama(attention)


class LayerRun:
    """Forward of a decoder layer that lets the backend run it if a pass only decodes, and is the layer's own else.

    Args:
        backend: of kernels.
        layer: one that `is_whole`, of a view.
    """

    def __init__(self, backend: Any, layer: Any) -> None:
        self._backend, self._layer = backend, layer
        attention, mlp = layer.self_attn, layer.mlp
        self._index, self._scaling = int(attention.layer_idx), float(attention.scaling)
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._linears = [attention._modules[name] for name in PROJECTIONS] + [mlp._modules[name] for name in MLP]
        self._adapter = attention._modules.get("gate_adapter")
        parts = [*self._norms, *self._linears, attention, mlp, mlp.act_fn, *filter(None, [self._adapter])]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._checked: tuple[list[int], LayerCache, CompressionConfig | None, bool] | None = None

    def __call__(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        """Run the layer; arguments are those of its own forward."""
        paged, rotary = named.get("paged_cache"), named.get("position_embeddings")
        if paged is not None and rotary is not None and self._backend.fits(hidden_states) and not any(self._hooks):
            weights = self._weights()
            whole = paged.whole_layer(self._index, rotary, lambda *kept: self._fits(weights, *kept))
            if whole is not None:
                return self._backend.decode_layer(hidden_states, weights, *whole, self._scaling)
        return type(self._layer).forward(self._layer, hidden_states, *given, **named)

    def _weights(self) -> LayerWeights:
        """Return the layer's weights, which may be others than in the last pass."""
        first, second = self._norms
        query, key, value, output, gate, up, down = map(weights_of, self._linears)
        norms = (
            first._parameters["weight"],
            first.variance_epsilon,
            second._parameters["weight"],
            second.variance_epsilon,
        )
        adapter = NO_WEIGHTS if self._adapter is None else weights_of(self._adapter)
        return LayerWeights(*norms, query, key, value, output, gate, up, down, adapter)

    def _fits(self, weights: LayerWeights, cache: LayerCache, config: CompressionConfig | None) -> bool:
        """Whether the backend can run the layer; asked anew when a tensor is another one, or elsewhere."""
        pairs = (weights.norm, weights.mlp_norm), *weights[4:]
        places = [given.data_ptr() for pair in pairs for given in pair if given is not None]
        known = self._checked
        if known is None or known[0] != places or known[1] is not cache or known[2] is not config:
            gates = None if config is None else (config.gate_input, config.decisions, config.decided_token)
            fits = gates in (None, GATES) and self._backend.why_not_whole(weights, cache, config) is None
            known = self._checked = places, cache, config, fits
        return known[3]
