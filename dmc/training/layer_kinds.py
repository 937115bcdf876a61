"""The kinds of a model's layers, and models of some of its layers: what is counted of a layer holds for its kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dmc.compression.full_attention import layer_windows

OF_EACH_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Fields of configurations with an item for each layer."""
DENSE_BELOW = ("first_k_dense_replace", "moe_layer_start_index")
"""Fields with the number of first layers that have no experts."""


def has_experts(config: PretrainedConfig) -> bool:
    """Whether a model has experts, maybe in some layers alone."""
    return getattr(config, "num_experts_per_tok", None) is not None


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer: those of one kind see equally many tokens, and their weights have equal shapes."""
    windows = layer_windows(config)
    if not has_experts(config):
        return [f"window {window}" for window in windows]
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    weights = [{name: tuple(weight.shape) for name, weight in layer.named_parameters()} for layer in layers]
    return [f"window {window}, {shapes}" for window, shapes in zip(windows, weights, strict=True)]


def with_layers(config: PretrainedConfig, kept: Sequence[int]) -> PretrainedConfig:
    """Copy a configuration for a model of some of its layers.

    Args:
        config: of a stock or compressed model.
        kept: ascending numbers of the layers.
    """
    values, count = config.to_dict(), config.num_hidden_layers
    values["num_hidden_layers"] = len(kept)
    for name in OF_EACH_LAYER:
        if values.get(name):
            values[name] = [values[name][index] for index in kept]
    for name in DENSE_BELOW:
        if values.get(name):
            values[name] = sum(index < values[name] for index in kept)
    if values.get("moe_layer_end_index") is not None:
        values["moe_layer_end_index"] = sum(index <= values["moe_layer_end_index"] for index in kept) - 1
    if values.get("decoder_sparse_step") is not None:
        step, dense = values["decoder_sparse_step"], set(values.get("mlp_only_layers") or ())
        dense |= {index for index in range(count) if (index + 1) % step}
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": [kept.index(index) for index in kept if index in dense]}
    return AutoConfig.for_model(values.pop("model_type"), **values)
