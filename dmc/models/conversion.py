"""Give a stock model learned cache compression: the same weights in its family's compressed class."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from dmc.compression import CompressionConfig
from dmc.models.families import FAMILIES
from dmc.models.modeling import CompressedCausalLM, check_gates


def check_retrofit(config: Any, compression: CompressionConfig) -> None:
    """Refuse a model, by its configuration alone, that cannot have these gates.

    Args:
        config: configuration of a stock causal LM, or of a compressed one whose gates shall change.
        compression: settings of the gates.
    Raises:
        ValueError, NotImplementedError: the family is not supported; see `check_gates`.
    """
    if config.model_type.removeprefix("dmc_") not in FAMILIES:
        raise ValueError(_unknown_family(config.model_type))
    check_gates(config, compression)


def _unknown_family(model: str) -> str:
    return (
        f"{model} cannot be retrofitted: expected a causal LM of one of {', '.join(sorted(FAMILIES))}; a new family is "
        "a line of dmc/models/families.py"
    )


def retrofit(model: Any, compression: CompressionConfig) -> CompressedCausalLM:
    """Give a Hugging Face model learned cache compression: same weights, and no new ones but those of an adapter.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 `*ForCausalLM`, or a compressed one whose gates shall change; its
            parameters are reused, not copied.
        compression: settings of the gates.
    Returns:
        The family's compressed class, in the mode (train or eval) of `model`.
    Raises:
        ValueError: the family is not supported.
        NotImplementedError: see `refuse_other_attention`.
    """
    if isinstance(model, CompressedCausalLM):
        model.compression = compression
        return model
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if model_type not in FAMILIES or type(model).__name__ != FAMILIES[model_type].__name__.removeprefix("DMC"):
        raise ValueError(_unknown_family(f"{type(model).__name__} (model_type {model_type!r})"))
    check_retrofit(model.config, compression)
    model_class = FAMILIES[model_type]
    values = model.config.to_dict()
    for key in ("model_type", "architectures", "transformers_version"):
        values.pop(key, None)
    config = model_class.config_class(**values, compression=compression.to_dict())
    with torch.device("meta"):
        compressed = model_class(config)
    share = compression.share_of_norm(compressed.model.layers[0].self_attn.head_dim)
    if model_class.attention_class.normalizes_heads and compression.borrows_key_neuron and share >= 0.01:
        warnings.warn(
            f"{model_type} normalizes its keys, and a borrowed neuron is read after that: a token that is merged or "
            f"dropped loses {share:.0%} of its key's squared norm. gate_input=hidden costs nothing, "
            "compression=dms_query next to nothing",
            stacklevel=2,
        )
    adapters = {
        name: torch.zeros_like(value, device=model.device, dtype=model.dtype)
        for name, value in compressed.state_dict().items()
        if ".gate_adapter." in name
    }
    compressed.load_state_dict(model.state_dict() | adapters, assign=True)
    compressed.model.rotary_emb = model.model.rotary_emb
    compressed.tie_weights()
    compressed.generation_config = model.generation_config
    return compressed.train(model.training)
