"""Stock models without a hub: random weights of a given shape, and twins that share their weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def random_model(shape: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Any:
    """Make a stock causal LM with random weights, in eval mode.

    Args:
        shape: fields of its transformers configuration, with `model_type`.
        dtype: of the weights.
        device: where they are made.
        seed: of the weights.
    """
    values = {"max_position_embeddings": 1 << 17, "bos_token_id": None, "eos_token_id": None, **shape}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def twin(model: Any) -> Any:
    """Make a second model over the same weights: settings of one do not reach the other."""
    with torch.device("meta"):
        other = type(model)(copy.deepcopy(model.config))
    other.load_state_dict(model.state_dict(), assign=True)
    other.model.rotary_emb = model.model.rotary_emb
    other.tie_weights()
    other.generation_config = copy.deepcopy(model.generation_config)
    return other.eval()
