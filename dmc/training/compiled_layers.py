"""Decoder layers as compiled code, each whole: layers that are alike share their graphs, in whatever step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

from dmc.compression import GateMode, GateTrace
from dmc.models.attention import CompressedAttentionMixin
from dmc.training.recompute import Recompute, kept_contexts

GRAPHS = 64
"""Most graphs of all layers: of each kind of layer, in training, as its own teacher and in validation."""


class LayerNoise:
    """The noise of one layer, without its number: code that reads the number is compiled for each layer anew.

    Args:
        noise: float32 [B, H, T].
    """

    def __init__(self, noise: Tensor) -> None:
        self._noise = noise

    def of_layer(self, index: int) -> Tensor:
        """Return it, see `DecisionNoise`."""
        return self._noise


class LayerTrace:
    """Takes down the decisions of one layer, which its code returns: recording them would be a side effect of it."""

    def __init__(self, alpha: Tensor | None = None, logits: Tensor | None = None) -> None:
        self.alpha, self.logits = alpha, logits

    def record(self, layer_index: int, gated: Any) -> None:
        """Take them down, see `GateTrace`."""
        self.alpha, self.logits = gated.alpha, gated.logits


def compile_layers(model: Any, recomputed: Recompute) -> None:
    """Compile the decoder layers of a stock or compressed causal LM that have attention, when they first run.

    Args:
        model: before its weights are laid over the ranks: what gathers them stays around compiled code.
        recomputed: what of a layer backward computes again: with True all; else what is cheap, of itself.
    """
    compiled = torch.compile(_outputs)
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.gradient_checkpointing = False
            layer.forward = partial(_run, layer, compiled, recomputed)


def _run(
    layer: Any,
    compiled: Callable[..., Any],
    recomputed: Recompute,
    hidden_states: Tensor,
    *,
    gate_mode: GateMode | None = None,
    gate_trace: GateTrace | None = None,
    **options: Any,
) -> Tensor:
    """Run a layer, compiled where one graph serves all layers and steps, and record its decisions."""
    mode = _shared_mode(layer, gate_mode)
    caches = options.get("past_key_values"), options.get("paged_cache")
    is_compiled = mode is not None and caches == (None, None)
    run = partial(_run_compiled, compiled, layer, mode) if is_compiled else partial(_outputs, layer, gate_mode)
    run = partial(run, options)
    if not (recomputed and layer.training and torch.is_grad_enabled()) or (is_compiled and recomputed == "selective"):
        hidden_states, *trace = run(hidden_states)  # compiled code computes what is cheap again of itself
    else:
        contexts: dict[str, Any] = {"context_fn": kept_contexts} if recomputed == "selective" else {}
        hidden_states, *trace = checkpoint(run, hidden_states, use_reentrant=False, **contexts)
    if gate_trace is not None and trace[0] is not None:
        gate_trace.record(layer.self_attn.layer_idx, LayerTrace(*trace))
    return hidden_states


def _run_compiled(compiled: Callable[..., Any], *given: Any) -> Any:
    """Run compiled code, whose backward runs as written: without autocast.

    DistributedDataParallel would cut its graphs at buckets, and each is of one layer.
    """
    as_written = functorch.patch(backward_pass_autocast="off")
    with as_written, torch._dynamo.config.patch(specialize_float=True, recompile_limit=GRAPHS, optimize_ddp=False):
        return compiled(*given)


def _shared_mode(layer: Any, mode: GateMode | None) -> GateMode | None:
    """Return a mode by which a layer decides as by `mode`, the same for all layers and steps; None: there is none."""
    attention = layer.self_attn
    if not isinstance(attention, CompressedAttentionMixin):
        return GateMode()  # which nobody reads
    config = attention.compressor.config
    if mode is None:
        return None if layer.training else GateMode()
    if mode.compressed_heads is not None or config.decisions == "fixed":
        return None
    if mode.neuron_multiplier is not None:
        return mode if mode.neuron_multiplier == 1.0 else None
    if mode.noise_seeds is None:
        return GateMode(skip_below=mode.skip_below)
    if not config.noise:
        return GateMode(noise_seeds=[], skip_below=mode.skip_below)
    if mode.noise is None:
        return None
    noise: Any = LayerNoise(mode.noise.of_layer(attention.layer_idx))
    return GateMode(noise_seeds=[], noise=noise, skip_below=mode.skip_below)


def _outputs(
    layer: Any, mode: GateMode | None, options: dict[str, Any], hidden_states: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a layer's output, [B, T, hidden], its decisions and their logits, [B, H, T], or None without gates."""
    trace = LayerTrace()
    if isinstance(layer.self_attn, CompressedAttentionMixin):
        options = {**options, "gate_mode": mode, "gate_trace": trace}
    hidden_states = type(layer).forward(layer, hidden_states, **options)
    return hidden_states, trace.alpha, trace.logits
