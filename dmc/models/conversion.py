"""Give a stock model learned cache compression: the same weights in its family's compressed class."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from dmc.compression import CompressionConfig
from dmc.compression.full_attention import refuse_other_attention
from dmc.models.adapter import OF_ADAPTERS
from dmc.models.families import FAMILIES
from dmc.models.layer_check import check_layer, unknown_convention
from dmc.models.modeling import CompressedCausalLM, check_gates
from dmc.models.ties import is_tied


def check_retrofit(config: Any, compression: CompressionConfig) -> None:
    """Refuse a model, by its configuration alone, that cannot have these gates.

    Args:
        config: configuration of a stock causal LM, or of a compressed one whose gates shall change.
        compression: settings of the gates.
    Raises:
        ValueError, NotImplementedError: the family is not supported; see `check_gates`.
    """
    if config.model_type.removeprefix("dmc_") not in FAMILIES:
        refuse_other_attention(config)
        raise ValueError(
            f"layer 0 of this {config.model_type} model cannot be retrofitted: {unknown_convention(config)}"
        )
    check_gates(config, compression)


def retrofit(model: Any, compression: CompressionConfig) -> CompressedCausalLM:
    """Give a Hugging Face model learned cache compression: the same weights, and those of an adapter if it has one.

    Args:
        model: the causal LM of a family in the table, or a compressed one whose gates shall change; its
            parameters are reused, not copied.
        compression: settings of the gates.
    Returns:
        The family's compressed class, in the mode (train or eval) of `model`.
    Raises:
        ValueError: the family is not in the table, its layer differs from ours with closed gates, or its heads cannot
            lend a neuron.
        NotImplementedError: no layer attends to all tokens; or one sees chunks, caps its scores, has MLA, or keeps a
            state that no cache holds; or RoPE depends on the length.
    """
    if isinstance(model, CompressedCausalLM):
        model.compression = compression
        return model
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if model_type in FAMILIES and type(model).__name__ != FAMILIES[model_type].__name__.removeprefix("DMC"):
        raise ValueError(f"{type(model).__name__} cannot be retrofitted: expected the causal LM of {model_type}")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} cannot be retrofitted: expected a causal LM of transformers")
    check_retrofit(model.config, compression)
    model_class = FAMILIES[model_type]
    stock_attention = model_class.attention_class.__mro__[2]
    for index, layer in enumerate(model.model.layers):
        if type(attention := getattr(layer, "self_attn", None)) not in (stock_attention, type(None)):
            raise ValueError(
                f"layer {index} of this {model_type} model cannot be retrofitted: its attention is a "
                f"{type(attention).__name__}, whose forward is not known; expected {stock_attention.__name__}"
            )
    values = model.config.to_dict()
    for key in ("model_type", "architectures", "transformers_version"):
        values.pop(key, None)
    values["tie_word_embeddings"] = is_tied(model)
    config = model_class.config_class(**values, compression=compression.to_dict())
    with torch.device("meta"):
        compressed = model_class(config)
    for layer in {
        layer.self_attn.rotates: layer.self_attn.layer_idx for layer in compressed.compressed_layers
    }.values():
        check_layer(model_type, compressed.config.to_json_string(), layer)
    attention = compressed.compressed_layers[0].self_attn
    share = compression.share_of_norm(attention.head_dim)
    if attention.normalizes and compression.borrows_key_neuron and share >= 0.01:
        warnings.warn(
            f"{model_type} normalizes its keys, and a borrowed neuron is read after that: a token that is merged or "
            f"dropped loses {share:.0%} of its key's squared norm. gate_input=hidden costs nothing, "
            "compression=dms_query next to nothing",
            stacklevel=2,
        )
    adapters = {
        name: torch.zeros_like(value, device=model.device, dtype=model.dtype)
        for name, value in compressed.state_dict().items()
        if OF_ADAPTERS in name
    }
    compressed.load_state_dict(model.state_dict() | adapters, assign=True)
    for name, module in compressed.named_modules():
        for key in module._non_persistent_buffers_set:
            setattr(module, key, model.get_submodule(name).get_buffer(key))
    compressed.tie_weights()
    compressed.generation_config = model.generation_config
    return compressed.train(model.training)
