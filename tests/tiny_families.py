"""Tiny models of every family of the table, and one family of each convention."""

import copy
import warnings
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import retrofit
from dmc.compression import CompressionConfig
from dmc.models import FAMILIES

SIZES = {
    "vocab_size": 83, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "sliding_window": None, "layer_types": None,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "no_rope_layers": [1, 0], "clip_qkv": 0.5, "use_qk_norm": True, "logit_scale": 0.25, "logits_scaling": 4.0,
    "attention_multiplier": 0.2, "residual_multiplier": 0.7,
}  # fmt: skip
"""Of every configuration class those fields that it has."""
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 16}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
OF_FAMILY = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), RECURRENT)
OF_FAMILY |= dict.fromkeys(("cohere2", "exaone4", "gemma3_text", "gpt_oss", "ministral", "olmo3"), HYBRID)
OF_FAMILY |= {"cwm": {"layer_types": ["full_attention"] * 2, "sliding_window": 8}, "dots1": {"n_shared_experts": 1}}
CONVENTIONS = {
    "qwen3_moe": "experts, each head normalized",
    "olmo2": "all heads normalized together",
    "glm4_moe": "some channels turn, by halves",
    "glm": "some channels turn, neighbors",
    "ernie4_5": "neighbors turn",
    "cohere": "neighbors turn, tables in turn",
    "smollm3": "a layer that does not turn",
    "hunyuan_v1_dense": "a norm behind RoPE",
    "bitnet": "a norm before the output",
    "phi3": "one projection",
    "granite": "factors",
    "ministral3": "queries that grow with their positions",
    "qwen3_next": "a layer without attention, a gate on the output",
    "gemma3_text": "windows, which turn in another way",
    "gpt_oss": "windows and sinks",
}


@cache
def stock_of(family, **changes):
    """Build a stock model of a family; weights are large enough that gates decide both ways, RoPE turns fast."""
    stock_config = FAMILIES[family].config_class.__mro__[2]
    fields = {name for kind in stock_config.__mro__ for name in getattr(kind, "__annotations__", {})}
    values = {name: value for name, value in (SIZES | changes).items() if name in fields}
    values |= OF_FAMILY.get(family, {})
    config = AutoConfig.for_model(family, **values)
    for rope in (
        config.rope_parameters.values() if "full_attention" in config.rope_parameters else [config.rope_parameters]
    ):
        rope["rope_theta"] = 100.0
    if family == "ministral3":
        config.rope_parameters |= {"original_max_position_embeddings": 16, "factor": 16.0}
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point() and "rotary_emb" not in name and "embed_scale" not in name:
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(value + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)  # some are 1 + w
    return model.eval()


def compressed_of(family, **gates):
    """Retrofit it, with gates that decide both ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = CompressionConfig(**{"decision_offset": 0.1, "omega_offset": 0.2, **gates})
        return retrofit(copy.deepcopy(stock_of(family)), settings)


def texts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 83, (length,), generator=generator).tolist() for length in lengths]
