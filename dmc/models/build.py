"""Models without a hub: random weights of a given shape, given weights, and twins that share their weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dmc.models.ties import is_tied, settle_ties, tied_names


def random_model(shape: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """Make a stock causal LM with random weights, in eval mode.

    Args:
        shape: fields of its transformers configuration, with `model_type`.
        dtype: of the weights.
        device: device of the weights.
        seed: seed of the weights.
    Raises:
        ValueError: no model has this shape.
    """
    values = {"max_position_embeddings": 1 << 17, "bos_token_id": None, "eos_token_id": None, **shape}
    check_shape(values, "the shape")
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no model has the shape {shape}: {error}") from error
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def refuse_kernels(config: Any, name: str) -> None:
    """Refuse a configuration that names an attention kernel on the hub: transformers would download and run it.

    Raises:
        ValueError: the configuration names one.
    """
    attention = str(getattr(config, "_attn_implementation", None))
    if "/" in attention:
        raise ValueError(f"{name} names the attention {attention}, code on the hub: remove attn_implementation from it")


def check_shape(values: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError that names the configuration if it has no layers, or its KV heads do not divide the heads."""
    layers = values.get("num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:
        raise ValueError(f"{name}: num_hidden_layers={layers}: expected a whole number >= 1")
    heads, kv_heads = (values.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(f"{name}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")


def assemble(config: Any, weights: dict[str, Tensor]) -> Any:
    """Make a causal LM over given weights, without a copy, in eval mode.

    Args:
        config: its transformers configuration, which is untied where the weights hold a head of its own.
        weights: every weight under its name, tied ones under one of theirs.
    Raises:
        RuntimeError: a weight is missing, unexpected, or of another shape.
        ValueError: see `refuse_kernels`.
    """
    refuse_kernels(config, "the configuration")
    settle_ties(config, weights)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ties = tied_names(config) if config.tie_word_embeddings else {}
    tied = {name: weights[source] for name, source in ties.items() if source in weights}
    model.load_state_dict(tied | weights, assign=True)
    model.tie_weights()
    fill_buffers(model, next(iter(weights.values())).device)
    return model.eval()


def fill_buffers(model: Any, device: torch.device | str) -> None:
    """Compute the buffers of a model made on the meta device that no file holds: RoPE's angles, scales of embeddings.

    Args:
        model: a causal LM, its weights in place.
        device: of the buffers.
    """
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    embedding = model.model.embed_tokens
    if hasattr(embedding, "scalar_embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=device)


def twin(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Make a second model that shares the weights, or has them in another dtype, but not the settings."""
    weights = {name: value if dtype is None else value.to(dtype) for name, value in model.state_dict().items()}
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = is_tied(model)
    other = assemble(config, weights)
    other.generation_config = copy.deepcopy(model.generation_config)
    return other
