"""Stock Hugging Face models on the paged cache: a registered attention function that calls the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from dmc.runtime.paged_forward import PagedForward

STOCK_ATTENTION = "dmc_paged"
HARMLESS = {
    "position_ids": "queries and keys are rotated already",
    "output_attentions": "a wish to see the weights, which the engine never has",
    "output_router_logits": "of the model, not of attention",
    "use_cache": "the engine says no: its cache is not the model's",
}
"""Keywords that do not change the attention's result, and why."""


class StockAttention:
    """Lets a stock model use the paged cache while a pass runs; before and after, its attention is its own.

    No mask function is registered beside the attention function, so transformers builds no mask, whose size would be
    the square of a pass's tokens.

    Args:
        model: causal LM.
    Raises:
        NotImplementedError: it has attention sinks, which configurations do not declare.
    """

    def __init__(self, model: Any) -> None:
        for name, _ in model.named_parameters():
            if name.rpartition(".")[2] in ("sink", "sinks"):
                layer = next(filter(str.isdigit, name.split(".")), "?")
                raise NotImplementedError(
                    f"layer {layer} of this {model.config.model_type} model has attention sinks ({name}), which the "
                    "paged cache does not serve"
                )
        every = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        self._configs = [config for config in every.values() if isinstance(config, PreTrainedConfig)]
        self._own: list[Any] = []

    def __enter__(self) -> None:
        self._own = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = STOCK_ATTENTION

    def __exit__(self, *_: object) -> None:
        for config, own in zip(self._configs, self._own, strict=True):
            config._attn_implementation = own


@torch.compiler.disable
def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    paged_cache: PagedForward | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the engine's cache; query and key are rotated already. No part of compiled layers.

    Args: as transformers gives them to an attention function: query [1, H_q, T, D], key and value [1, H, T, D];
        `paged_cache` is the keyword that the engine adds to the model's own.
    Returns:
        [1, T, H_q, D], and no weights.
    Raises:
        NotImplementedError: the model asks for more than full causal attention, or does not hand on the cache.
    """
    config: Any = module.config
    if sliding_window is not None and sliding_window >= config.max_position_embeddings:
        sliding_window = None
    asked = {
        "attention_mask": attention_mask,
        "dropout": dropout or None,
        "is_causal": False if is_causal is False else None,
        "sliding_window": sliding_window,
        **{name: value for name, value in kwargs.items() if name not in HARMLESS},
    }
    for name, wish in asked.items():
        if wish is not None:
            shown = tuple(wish.shape) if isinstance(wish, Tensor) else wish
            raise NotImplementedError(
                f"layer {module.layer_idx} of this {config.model_type} model asks its attention for {name}={shown}, "
                "which the paged cache does not serve"
            )
    if paged_cache is None:
        raise NotImplementedError(
            f"this {config.model_type} model does not hand keywords on to its attention, so that its layers cannot "
            "find the paged cache"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = paged_cache.attend_plain(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(STOCK_ATTENTION, stock_attention)
