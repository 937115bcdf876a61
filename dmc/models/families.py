"""The table of model families. A family's three classes are its stock classes under our mixins, so a family is a name.

"Llama" makes `DMCLlamaConfig`, `DMCLlamaAttention` and `DMCLlamaForCausalLM`, members of this module. What
distinguishes families is read off the stock classes: `rotation.py` finds how channels rotate, `attention.py` which
projections, norms and factors a layer has, and `layer_check.py` whether that was all.
"""

from __future__ import annotations

import sys
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from dmc.models.attention import CompressedAttentionMixin
from dmc.models.modeling import CompressedCausalLM, CompressedConfigMixin
from dmc.models.rotation import Rotation

TABLE = (
    "Apertus", "Arcee", "BitNet", "Cohere", "Cohere2", "Cwm", "Dots1", "Ernie4_5", "Ernie4_5_Moe", "Exaone4",
    "FlexOlmo", "Gemma", "Gemma3", "Glm", "Glm4", "Glm4Moe", "GptOss", "Granite", "GraniteMoe", "GraniteMoeShared",
    "Helium", "HunYuanDenseV1", "HunYuanMoEV1", "HyperCLOVAX", "HYV3", "Jais2", "Llama", "MiniMaxM2", "Ministral",
    "Ministral3", "Mistral", "Mixtral", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3",
    "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "SeedOss", "SmolLM3", "SolarOpen", "Starcoder2",
)  # fmt: skip
"""Names that begin the stock classes: `LlamaConfig`, `LlamaAttention`, `LlamaForCausalLM`."""


def _subclass(name: str, bases: tuple[type, ...], doc: str, **members: Any) -> Any:
    """Make a class of this module, where pickle and transformers find it by its name."""
    made = type(bases[-1])(name, bases, {"__module__": __name__, "__doc__": doc, **members})
    setattr(sys.modules[__name__], name, made)
    return made


def _compressed_class(name: str) -> type[CompressedCausalLM]:
    stock: Any = getattr(transformers, f"{name}ForCausalLM")
    modeling = sys.modules[stock.__module__]
    stock_attention = getattr(modeling, f"{name}Attention")
    config = _subclass(
        f"DMC{name}Config",
        (CompressedConfigMixin, stock.config_class),
        f"{name}'s configuration plus `compression`.",
        model_type=f"dmc_{stock.config_class.model_type}",
    )
    attention = _subclass(
        f"DMC{name}Attention",
        (CompressedAttentionMixin, stock_attention),
        f"{name}'s projections under the compressed forward.",
        modeling=modeling,
        rotation=Rotation.of(modeling.apply_rotary_pos_emb),
    )
    return _subclass(
        f"DMC{name}ForCausalLM",
        (CompressedCausalLM, stock),
        f"{name} whose KV heads merge or drop cache entries.",
        config_class=config,
        attention_class=attention,
    )


FAMILIES: dict[str, type[CompressedCausalLM]] = {
    model.config_class.model_type.removeprefix("dmc_"): model for model in map(_compressed_class, TABLE)
}
"""Compressed class of each stock `model_type`."""

for _model in FAMILIES.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)
