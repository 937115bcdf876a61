"""Stock Hugging Face models on the paged cache: a registered attention function that hands over to the step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dmc.runtime.step import Step

STOCK_ATTENTION = "dmc_paged"


def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    paged_cache: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend through the engine's cache where there is one, else as `sdpa`; query and key are rotated already."""
    if paged_cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if getattr(module, "sliding_window", None) is not None:
        raise NotImplementedError(
            f"layer {module.layer_idx} has a sliding window, which the paged cache does not serve"
        )
    attended = paged_cache.attend_plain(int(module.layer_idx), query, key, value, scaling)  # type: ignore[arg-type]
    return attended.transpose(1, 2).contiguous(), None


def paged_mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Build the mask of `sdpa`; the engine's flat rows need none and pass a 1-token shape through unused."""
    return sdpa_mask(attention_mask=attention_mask, **kwargs)


def use_stock_attention(model: Any) -> None:
    """Make a stock model ask the paged cache; without the engine's keyword it behaves as before, on `sdpa`."""
    if model.config._attn_implementation != STOCK_ATTENTION:
        model.set_attn_implementation(STOCK_ATTENTION)


AttentionInterface.register(STOCK_ATTENTION, stock_attention)
AttentionMaskInterface.register(STOCK_ATTENTION, paged_mask)
