"""Reading slots out of pages."""

from __future__ import annotations

from torch import Tensor


def gather_pages(pages: Tensor, block_tables: Tensor, num_slots: int) -> Tensor:
    """Copy the first `num_slots` slots of each head out of their pages, [S, H, num_slots, D]."""
    num_blocks = -(-num_slots // pages.shape[1])
    return pages[block_tables[..., :num_blocks].long()].flatten(2, 3)[:, :, :num_slots]
