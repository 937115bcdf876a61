"""Whether a family's attention is understood: one layer with closed gates against the stock one, before a retrofit."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM

from dmc.compression import CompressionConfig, full_attention_tables
from dmc.models.families import FAMILIES
from dmc.models.masked_attention import as_on
from dmc.models.tensor_parallel import UNDERSTOOD

NUM_TOKENS = 7
TOLERANCE = 1e-4
"""Largest difference of outputs in float32, relative to their largest."""


@functools.lru_cache
def check_layer(model_type: str, config_json: str, layer_index: int) -> None:
    """Compare a family's layer with closed gates with the stock one, both with the same random weights, on the CPU.

    Heads, their channels, RoPE, norms and factors are the configuration's. There are as few groups of heads as show
    what differs, two, and `hidden_size` shrinks in proportion where that divides evenly.

    Args:
        model_type: of the stock family.
        config_json: a compressed configuration.
        layer_index: of the layer.
    Raises:
        ValueError: they differ.
    """
    values = json.loads(config_json)
    values.pop("model_type")
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    groups = min(2, values["num_key_value_heads"])
    few = heads // values["num_key_value_heads"] * groups
    if hidden * few % heads == 0:
        sizes = {"num_attention_heads": few, "num_key_value_heads": groups, "hidden_size": hidden * few // heads}
        values |= sizes
    values["compression"] = CompressionConfig(gate_input="hidden").to_dict()
    model_class = FAMILIES[model_type]
    with _disable_current_modes(), as_on("cpu"), torch.device("cpu"), torch.random.fork_rng([]), torch.no_grad():
        config = model_class.config_class(**values)
        config._attn_implementation = "eager"
        ours = model_class.attention_class(config, layer_index).float().eval()
        stock = model_class.attention_class.__mro__[2](config, layer_index).float().eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        ours.gate_adapter.reset_parameters()  # type: ignore[union-attr]
        stock.load_state_dict(ours.state_dict(), strict=False)
        modeling = model_class.attention_class.modeling
        expected, found = (_outputs(layer, modeling, config) for layer in (stock, ours))
        difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference < TOLERANCE:
        raise ValueError(
            f"layer {layer_index} of this {model_type} model cannot be retrofitted: with closed gates its attention "
            f"differs from the stock one by {difference:.1%} on random weights, so it has a convention that is unknown"
        )


def _outputs(layer: nn.Module, modeling: Any, config: Any) -> Tensor:
    """Run a layer on random tokens."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, NUM_TOKENS, config.hidden_size, generator=generator)
    (rotary_class,) = (
        value
        for name, value in vars(modeling).items()
        if name.endswith("RotaryEmbedding") and not name.endswith("VisionRotaryEmbedding")
    )
    positions = torch.arange(NUM_TOKENS)[None]
    causal = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)[None, None]
    rotary = full_attention_tables(rotary_class(config), states, positions)
    output: Tensor = layer(states, position_embeddings=rotary, attention_mask=causal, position_ids=positions)[0]
    return output


def unknown_convention(config: Any) -> str:
    """Say what the one attention forward does not know in a model of a type that is not in the table.

    Args:
        config: its transformers configuration.
    """
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = 1
    try:
        with _disable_current_modes(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shallow)
    except Exception as error:
        return f"transformers makes no causal LM of it ({str(error).splitlines()[0]})"
    for module in model.modules():
        names = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
        if "Attention" not in type(module).__name__ or not names:
            continue
        if unknown := sorted(name for name in names - UNDERSTOOD if "dropout" not in name):
            return f"nothing is known of {', '.join(unknown)} in its attention ({type(module).__name__})"
        return (
            f"the forward of its attention ({type(module).__name__}) is not known to be that of a family in the table"
        )
    return "its layers have no attention"
