"""Access to slots in pages, by block tables."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
"""Largest number of an 8-bit page."""


def quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., D] to 8 bits: int8 [..., D], and the factor of each row, float32 [..., 1], NaN if one of them is.

    The error of a channel is at most half the factor, 1/254 of the largest channel.
    """
    states = states.float()
    largest = states.abs().amax(-1, keepdim=True)
    steps = (states * (LARGEST / largest)).nan_to_num(0.0).clamp(-LARGEST, LARGEST)
    return steps.round().to(torch.int8), largest / LARGEST


def gather_pages(pages: Tensor, block_tables: Tensor, num_slots: int, scales: Tensor | None = None) -> Tensor:
    """Copy the first `num_slots` slots of each head out of their pages, times their scales; [S, H, num_slots, D]."""
    blocks = block_tables[..., : -(-num_slots // pages.shape[1])].long()
    read = pages[blocks] if scales is None else pages[blocks] * scales[blocks]
    return read.flatten(2, 3)[:, :, :num_slots]


def places(block_tables: Tensor, slots: Tensor, block_size: int, sequence: Tensor | None = None) -> Tensor:
    """Return the indices of slots (or of parts of a block) in flattened pages.

    Args:
        block_tables: int32 [S, H, M].
        slots: [S or 1, H or 1, K], or [T, H] of flat tokens; unused ones may be any number within the table.
        block_size: slots (or parts) of a block.
        sequence: index of each flat token's sequence, int64 [T].
    Returns:
        int64 [S, H, K] or [T, H], into `pages.flatten(0, 1)`.
    """
    if sequence is None:
        slots = slots.expand(*block_tables.shape[:2], -1)
        blocks = block_tables.gather(2, slots // block_size)
    else:
        heads = torch.arange(block_tables.shape[1], device=slots.device)
        blocks = block_tables[sequence[:, None], heads, slots // block_size]
    return blocks.long() * block_size + slots % block_size


def small_pages(pages: Tensor, page_size: int) -> Tensor:
    """View pages [N, block, ...] as smaller ones, [N * block / page_size, page_size, ...]."""
    return pages.view(-1, page_size, *pages.shape[2:])


def gather_slots(pages: Tensor, block_tables: Tensor, slots: Tensor) -> Tensor:
    """Copy slots of each head, int64 [S or 1, H or 1, K], out of pages [N, block, ...]: [S, H, K, ...]."""
    return pages.flatten(0, 1)[places(block_tables, slots, pages.shape[1])]


def slots_below(lengths: Tensor, num_slots: int) -> Tensor:
    """Return whether each slot is below the length, bool [..., num_slots]; lengths [...]."""
    return torch.arange(num_slots, device=lengths.device) < lengths[..., None]
