"""Reads any set of entries without a copy: to a kernel, pages are also a pool of pages of fewer entries."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from dmc.kernels import choose_backend
from dmc.runtime.paged_cache import CacheLayout


def small_pages(pages: Tensor, page_size: int) -> Tensor:
    """View pages [N, block, ...] as smaller ones, [N * block / page_size, page_size, ...]."""
    return pages.view(-1, page_size, *pages.shape[2:])


def small_page_ids(block_tables: Tensor, index: Tensor, pages_per_block: int) -> Tensor:
    """Find small pages of each head by their place in its sequence.

    Args:
        block_tables: int32 [S, H, M].
        index: which small pages, int64 [S, H or 1, K]; any number within the sequence where it does not matter.
        pages_per_block: small pages of a block.
    Returns:
        int32 [S, H, K], for `small_pages`.
    """
    index = index.expand(-1, block_tables.shape[1], -1)
    blocks = block_tables.gather(2, index // pages_per_block)
    return blocks * pages_per_block + (index % pages_per_block).to(blocks.dtype)


def gather_slots(pages: Tensor, block_tables: Tensor, slots: Tensor) -> Tensor:
    """Copy entries of each head by their slot, int64 [S, H or 1, K], out of pages [N, block, D]: [S, H, K, D]."""
    return small_pages(pages, 1)[small_page_ids(block_tables, slots, pages.shape[1]).long()].squeeze(3)


def backend_for_pages(backend: ModuleType, layout: CacheLayout, page_size: int) -> ModuleType:
    """Return the backend if it serves pages of this size (flash-attn 2 may not), else the best one that does."""
    if backend.supports(layout.dtype, layout.head_dim, page_size, layout.device) is None:
        return backend
    return choose_backend("auto", layout.dtype, layout.head_dim, page_size, layout.device)


def with_tail(chosen: Tensor, counts: Tensor, begins: Tensor, ends: Tensor, width: int) -> Tensor:
    """Let positions begin..end-1 of each sequence follow the chosen ones.

    Args:
        chosen: int64 [S, k].
        counts: how many of them there are, [S].
        begins: [S].
        ends: [S].
        width: a bound on what there is in all.
    Returns:
        int64 [S, width]; the last position again and again beyond the end.
    """
    column = torch.arange(width, device=chosen.device)
    missing = width - chosen.shape[1]
    chosen = torch.nn.functional.pad(chosen, (0, missing)) if missing > 0 else chosen[:, :width]
    tail = (column - (counts - begins)[:, None]).clamp_max((ends - 1)[:, None])
    return chosen.where(column < counts[:, None], tail)
