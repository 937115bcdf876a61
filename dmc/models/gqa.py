"""Conversion to grouped-query attention: a trained model's KV heads are averaged; a baseline of the DMC paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dmc.models.recurrent import attention_layers


def merge_kv_heads(model: Any, num_key_value_heads: int) -> Any:
    """Average contiguous groups of KV heads (Ainslie et al., arXiv:2305.13245), in place; then train on.

    A new head's rows of W_k and W_v, biases too, are the means of its group's; queries, and norms of keys, which all
    heads share, stay. A model whose heads are equal within each group does not change. The cache shrinks by old / new.

    Args:
        model: stock causal LM of a family in the table, on any device, meta included.
        num_key_value_heads: KV heads of each layer afterwards.
    Returns:
        The model, its configuration changed.
    Raises:
        ValueError: the heads cannot be divided into so many groups, share weights, or have gates.
    """
    attention, *_ = attention_layers(model)
    for name, weight in attention.named_parameters():
        if name.startswith("qkv_proj") or (name.startswith("k_norm") and weight.numel() != attention.head_dim):
            raise ValueError(
                f"layer {attention.layer_idx} of this {model.config.model_type} model has self_attn.{name} for all KV "
                "heads together: heads cannot be merged"
            )
    merge_heads_of_config(model.config, num_key_value_heads)
    for attention in attention_layers(model):
        for projection in (attention.k_proj, attention.v_proj):
            for name, parameter in list(projection.named_parameters()):
                merged = merge_rows(parameter.detach(), num_key_value_heads * attention.head_dim, attention.head_dim)
                setattr(projection, name, nn.Parameter(merged, parameter.requires_grad))
            projection.out_features = projection.weight.shape[0]
        attention.num_key_value_groups = model.config.num_attention_heads // num_key_value_heads
    return model


def merge_heads_of_config(config: PreTrainedConfig, num_key_value_heads: int) -> None:
    """Set the KV heads of a configuration.

    Raises:
        ValueError: its heads cannot be divided into so many groups of equal size, or have gates.
    """
    if config.model_type.startswith("dmc_"):
        raise ValueError(
            f"a {config.model_type} model has gates that decide for each KV head: merge the heads of the stock model, "
            "then retrofit it"
        )
    before = config.num_key_value_heads
    if num_key_value_heads < 1 or before % num_key_value_heads:
        divisors = [str(count) for count in range(1, before + 1) if before % count == 0]
        raise ValueError(
            f"{before} KV heads cannot be merged into {num_key_value_heads} groups of equal size: expected one of "
            f"{', '.join(divisors)}"
        )
    config.num_key_value_heads = num_key_value_heads


def merge_rows(weight: Tensor, num_rows: int, head_dim: int) -> Tensor:
    """Average a projection's rows over the heads of each group, in float32 at least.

    Args:
        weight: weight or bias, [heads * D, ...].
        num_rows: rows afterwards, groups * D; the weight is returned unchanged if it has as many.
        head_dim: D.
    """
    if num_rows == weight.shape[0]:
        return weight
    grouped = weight.unflatten(0, (num_rows // head_dim, -1, head_dim))
    wide = torch.promote_types(weight.dtype, torch.float32)
    return grouped.mean(1, dtype=wide).to(weight.dtype).flatten(0, 1)
