"""What of a layer backward computes again, in place of keeping it: all, or what is cheap."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dmc.models.masked_attention.fused import fused_attention

Recompute = bool | Literal["selective"]
"""False: nothing; "selective": all but matrix products and attention; True: whole layers."""


def kept_operations() -> list[Any]:
    """List what "selective" keeps: the outputs of matrix products by weights, and of attention."""
    aten = torch.ops.aten
    attention = (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
    products = (aten.mm, aten.addmm, aten._grouped_mm)
    return [fused_attention._opoverload, *(operation.default for operation in (*attention, *products))]


def kept_contexts() -> Any:
    """Return the contexts of "selective", of the first pass and of the second: see `torch.utils.checkpoint`."""
    return create_selective_checkpoint_contexts(kept_operations())


def recompute(model: Any, how: Recompute) -> None:
    """Let the layers of a stock or compressed causal LM compute again in backward what `how` says."""
    if not how:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = kept_contexts
    name = "activation_checkpointing_enable"  # older versions of transformers have another name
    getattr(model, name, model.gradient_checkpointing_enable)(options)
