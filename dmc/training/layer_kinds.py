"""The kinds of a model's layers, and models of some of its layers: what is counted of a layer holds for its kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dmc.compression.full_attention import layer_windows

OF_EACH_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Fields of configurations with an item for each layer."""


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
    Raises:
        NotImplementedError: the family's fields cannot say which of these layers have experts.
    """
    values, count = config.to_dict(), config.num_hidden_layers
    values["num_hidden_layers"] = len(kept)
    for name in OF_EACH_LAYER:
        if values.get(name):
            values[name] = [values[name][index] for index in kept]
    if values.get("first_k_dense_replace"):
        values["first_k_dense_replace"] = sum(index < values["first_k_dense_replace"] for index in kept)
    if (interval := values.get("moe_layer_interval")) is not None:
        first, last = values["moe_layer_start_index"], values["moe_layer_end_index"]
        sparse = [index for index in kept if first <= index <= last and (index + 1) % interval == 0]
        values |= _experts_every([kept.index(index) for index in sparse], len(kept))
    if values.get("decoder_sparse_step") is not None:
        step, dense = values["decoder_sparse_step"], set(values.get("mlp_only_layers") or ())
        dense |= {index for index in range(count) if (index + 1) % step}
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": [kept.index(index) for index in kept if index in dense]}
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _experts_every(sparse: Sequence[int], count: int) -> dict[str, int]:
    """Return the fields of Ernie 4.5 for a model of `count` layers, of which `sparse` have experts."""
    first, last = (sparse[0], sparse[-1]) if sparse else (count, count)
    for interval in range(1, count + 1):
        if [index for index in range(first, min(last + 1, count)) if (index + 1) % interval == 0] == [*sparse]:
            return {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": interval}
    raise NotImplementedError(f"of {count} layers {[*sparse]} have experts: no moe_layer_interval says so")
