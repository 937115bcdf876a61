"""Compaction after eviction, against python lists of slots and blocks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from covering import cover
from oracles.backends import backends_here
from oracles.cache_layers import copy_to, fill, make_layer

from dmc.kernels import load_backend
from dmc.kernels.base import LayerCache

LENGTHS = [[0, 1], [15, 16], [17, 80]]


@pytest.fixture(params=backends_here(16))
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return load_backend(request.param)


def slots_of(layer: LayerCache, row: int, head: int) -> list[tuple[Any, ...]]:
    """Read a head's slots, one by one."""
    size = layer.block_size
    places = [
        (int(layer.block_tables[row, head, slot // size]), slot % size) for slot in range(int(layer.lengths[row, head]))
    ]
    return [tuple(pages[place].tolist() for pages in layer.slot_pages) for place in places]


@pytest.mark.parametrize(
    ("dtype", "rows", "share"),
    cover((torch.float32, torch.bfloat16), ([0, 1, 2], [2, 1], [1]), (0.0, 0.3, 0.95, 1.0)),
    ids=str,
)
def test_slots_that_stay_keep_their_order_and_blocks_come_back(
    backend: ModuleType, dtype: torch.dtype, rows: list[int], share: float
) -> None:
    if backend.supports(dtype, 16, 16, torch.device("cpu")) is not None:
        pytest.skip("not supported")
    layer = fill(make_layer(None, max_blocks=5, dtype=dtype), torch.tensor(LENGTHS))
    pages = layer.key_pages.shape[:2]
    layer.entry_metadata = {"position": torch.arange(pages.numel()).view(pages).int(), "mass": torch.rand(pages)}
    before = copy_to(layer, "cpu")
    keep = torch.rand(len(rows), 2, 80, generator=torch.Generator().manual_seed(0)) < share
    backend.compact(layer, torch.tensor(rows), keep)

    stack = before.free_blocks[: int(before.num_free)].tolist()
    for sequence, row in enumerate(rows):
        for head in range(2):
            slots = slots_of(before, row, head)
            kept = [slot for slot, stays in zip(slots, keep[sequence, head].tolist(), strict=False) if stays]
            assert slots_of(layer, row, head) == kept
            table, needed, had = before.block_tables[row, head].tolist(), -(-len(kept) // 16), -(-len(slots) // 16)
            stack += table[needed:had]
    assert layer.free_blocks[: int(layer.num_free)].tolist() == stack
    assert torch.equal(layer.block_tables, before.block_tables)
    for row in set(range(3)) - set(rows):
        for head in range(2):
            assert slots_of(layer, row, head) == slots_of(before, row, head)


def test_pages_of_other_heads_are_untouched(backend: ModuleType) -> None:
    layer = fill(make_layer(None, max_blocks=5), torch.tensor(LENGTHS))
    before = copy_to(layer, "cpu")
    backend.compact(layer, torch.tensor([2]), torch.zeros(1, 2, 80, dtype=torch.bool))
    assert torch.equal(layer.key_pages, before.key_pages) and torch.equal(layer.value_pages, before.value_pages)
    assert layer.lengths[2].tolist() == [0, 0] and layer.lengths[:2].tolist() == LENGTHS[:2]
