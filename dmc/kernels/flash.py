"""Attend with flash-attn's paged kernels: KV heads are folded into the batch, so each has its own length and table.

They serve decode attention without scores, and prompts of which every token is appended. Everything else is left to the
best other backend of the device. FlashAttention-3 (Hopper) takes pages of any size, flash-attn 2 multiples of 256.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dmc.kernels import load_backend
from dmc.kernels.base import Recent, VisibleKeys
from dmc.kernels.batch import ForwardBatch

FLASH_2_PAGE = 256
"""Flash-attn 2 takes pages of multiples of this many slots."""


def supports(dtype: torch.dtype, head_dim: int, block_size: int, device: torch.device) -> str | None:
    """Return why flash-attn cannot serve such a cache, or None.

    Raises:
        ImportError: neither FlashAttention-3 nor flash-attn 2 is installed.
    """
    _, table_name = _library()
    if device.type != "cuda":
        return f"kernels.flash needs an NVIDIA GPU, the cache is on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype={dtype} is not supported by kernels.flash (bfloat16, float16); use kernels='triton'"
    if head_dim % 8 or head_dim > 256:
        return f"head_dim={head_dim} is not supported by kernels.flash (multiples of 8 up to 256)"
    if table_name == "block_table" and block_size % FLASH_2_PAGE:
        return (
            f"block_size={block_size} is not supported by kernels.flash with flash-attn 2 (multiples of "
            f"{FLASH_2_PAGE}); use kernels='triton', install FlashAttention-3, or use block_size={FLASH_2_PAGE}"
        )
    if table_name == "page_table" and torch.cuda.get_device_capability(device)[0] != 9:
        return f"FlashAttention-3 needs a Hopper GPU, not {torch.cuda.get_device_name(device)}; use kernels='triton'"
    return None


@functools.cache
def _library() -> tuple[ModuleType, str]:
    """Return the installed library, and what it calls a block table."""
    for name, table_name in (("flash_attn_interface", "page_table"), ("flash_attn", "block_table")):
        try:
            return importlib.import_module(name), table_name
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError(
        "kernels='flash' needs FlashAttention-3 (flash_attn_interface) or flash-attn 2 (pip install flash-attn); "
        "without them use kernels='triton'"
    )


def __getattr__(name: str) -> Any:
    """Leave every other function of a backend to the best one of the GPU."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(load_backend("auto", _device()), name)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scaling: float,
    *,
    scales: None = None,
    rows: Tensor | None = None,
    recent: Recent | None = None,
    return_scores: bool = False,
    num_scores: int | None = None,
    chunk_ends: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dmc.kernels.reference.paged_attention`; flash-attn has neither scores nor a bias: another backend does.

    Raises:
        ImportError: neither FlashAttention-3 nor flash-attn 2 is installed.
    """
    if return_scores or bias is not None:
        options: dict[str, Any] = {"rows": rows, "recent": recent, "sinks": sinks, "bias": bias}
        options |= {"return_scores": return_scores, "num_scores": num_scores}
        other = load_backend("auto", query.device)
        return other.paged_attention(query, key_pages, value_pages, block_tables, lengths, scaling, **options)
    library, table_name = _library()
    if rows is not None:
        block_tables, lengths = block_tables[rows], lengths[rows]
    batch, kv_heads = lengths.shape
    grouped = query.reshape(batch, kv_heads, -1, query.shape[-1])
    out, lse = library.flash_attn_with_kvcache(
        grouped.flatten(0, 1).unsqueeze(1),  # [B * H, 1, group, D]
        key_pages.unsqueeze(2),  # [N, block, 1, D]
        value_pages.unsqueeze(2),
        cache_seqlens=lengths.flatten(),
        softmax_scale=scaling,
        return_softmax_lse=True,
        **{table_name: block_tables.flatten(0, 1)},
    )[:2]
    empty = (lengths == 0)[..., None]  # its lse is +inf or -inf, by version
    out = out.view(grouped.shape).masked_fill(empty[..., None], 0.0)
    lse = lse.view(grouped.shape[:3]).masked_fill(empty, -torch.inf)
    if recent is not None:
        out, lse = _with_recent(grouped, out, lse, recent, scaling)
    if sinks is not None:
        out = (out.float() * (lse - sinks.view(kv_heads, -1)).sigmoid()[..., None]).to(out.dtype)
    return out.view(query.shape)


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    batch: ForwardBatch,
    seen: VisibleKeys,
    scaling: float,
    scales: None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `dmc.kernels.reference.prefill_attention`; another backend serves sinks, biases, other masks.

    Raises:
        ImportError: neither FlashAttention-3 nor flash-attn 2 is installed.
    """
    pages = key_pages, value_pages
    if not seen.is_causal or sinks is not None or bias is not None:
        other, rest = load_backend("auto", query.device), (scaling, scales, return_lse, sinks, bias)
        return other.prefill_attention(query, *pages, block_tables, batch, seen, *rest)  # type: ignore[no-any-return]
    library, table_name = _library()
    kv_heads, (place, bounds) = seen.slots.shape[1], batch.by_head(seen.slots.shape[1])
    folded = query.new_empty(place.numel(), query.shape[1] // kv_heads, query.shape[2])
    folded[place] = query.unflatten(1, (kv_heads, -1))
    lengths, tables = seen.slots[batch.last].flatten(), block_tables[batch.row_index].flatten(0, 1)
    states = folded, *(states.unsqueeze(2) for states in pages)
    options = {table_name: tables, "max_seqlen_q": batch.most_new, "softmax_scale": scaling, "causal": True}
    if table_name == "page_table":
        options["return_softmax_lse"] = return_lse
        out = library.flash_attn_with_kvcache(*states, cache_seqlens=lengths, cu_seqlens_q=bounds, **options)
    else:
        options["return_attn_probs"] = return_lse  # its name for the log-sum-exp
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        options["max_seqlen_k"] = tables.shape[1] * key_pages.shape[1]
        out = library.flash_attn_varlen_func(*states, cu_seqlens_q=bounds, cu_seqlens_k=ends, **options)
    if return_lse:
        out, lse = out[:2]  # lse [group, T H]
        return out[place].flatten(1, 2), lse.T[place].flatten(1, 2)
    return out[place].flatten(1, 2)


def _with_recent(grouped: Tensor, out: Tensor, lse: Tensor, recent: Recent, scaling: float) -> tuple[Tensor, Tensor]:
    """Join attention over slots, `out` [B, H, group, D] and its log-sum-exp, with raw recent tokens; return both."""
    batch = len(grouped)
    key, value = (states.float().unflatten(0, (batch, -1)).transpose(1, 2) for states in (recent.key, recent.value))
    scores = grouped.float() @ key.transpose(-1, -2) * scaling
    scores = scores.masked_fill(~recent.exists.view(batch, 1, 1, -1), -torch.inf)  # [B, H, group, W]
    joined_lse = torch.logaddexp(lse, scores.logsumexp(-1))
    total = joined_lse.masked_fill(joined_lse == -torch.inf, 0.0)[..., None]
    joined = out.float() * (lse[..., None] - total).exp() + (scores - total).exp() @ value
    return joined.to(out.dtype), joined_lse
