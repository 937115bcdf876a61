"""The table of model families. A family's three classes are its stock classes under our mixins, so a family is a line.

`Family("Llama")` makes `DMCLlamaConfig`, `DMCLlamaAttention` and `DMCLlamaForCausalLM`, members of this module.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from dmc.models.attention import CompressedAttentionMixin
from dmc.models.modeling import CompressedCausalLM, CompressedConfigMixin


@dataclass(frozen=True)
class Family:
    """What distinguishes the attention of a family from Llama's."""

    name: str
    """Begins the names of the stock classes: `LlamaConfig`, `LlamaAttention`, `LlamaForCausalLM`."""
    normalizes_heads: bool = False
    """Whether `q_norm` and `k_norm` normalize each head's queries and keys before RoPE."""


TABLE = (
    Family("Llama"),
    Family("Mistral"),
    Family("Qwen2"),
    Family("Qwen3", normalizes_heads=True),
)


def _subclass(name: str, bases: tuple[type, ...], doc: str, **members: Any) -> Any:
    """Make a class of this module, where pickle and transformers find it by its name."""
    made = type(bases[-1])(name, bases, {"__module__": __name__, "__doc__": doc, **members})
    setattr(sys.modules[__name__], name, made)
    return made


def _compressed_class(family: Family) -> type[CompressedCausalLM]:
    name = family.name
    stock: Any = getattr(transformers, f"{name}ForCausalLM")
    stock_attention = getattr(sys.modules[stock.__module__], f"{name}Attention")
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
        normalizes_heads=family.normalizes_heads,
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
