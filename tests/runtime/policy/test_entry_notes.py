"""Notes of entries against python lists."""

from __future__ import annotations

import pytest
import torch

from dmc.runtime.paged_cache import CacheLayout
from dmc.runtime.policy.entry_notes import NoteLayout, NoteStore, places_of, rewrite_in_order

BLOCK, HEADS, HEAD_DIM, BLOCKS = 4, 3, 2, 40
LENGTHS = torch.tensor([[9, 4, 1], [6, 12, 8]])


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def tables(random: torch.Generator) -> torch.Tensor:
    """Blocks of two sequences, scattered over the pool, [2, H, 3]."""
    return torch.randperm(BLOCKS, generator=random)[: 2 * HEADS * 3].view(2, HEADS, 3).int()


def make_store(
    num_sums: int = 2, keeps_slots: bool = True, memory_size: int = 3, num_blocks: int = BLOCKS
) -> NoteStore:
    return NoteStore(NoteLayout(num_sums, keeps_slots, memory_size), (2, 5), num_blocks, BLOCK, torch.device("cpu"))


def entries_of(pages: torch.Tensor, table: torch.Tensor, length: int) -> list:
    """Read one head's entries out of their blocks."""
    return [pages[table[i // BLOCK], i % BLOCK].tolist() for i in range(length)]


def test_bytes_are_those_of_position_slot_and_sums() -> None:
    cache = CacheLayout(2, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    for layout, per_entry in ((NoteLayout(0, False, 0), 4), (NoteLayout(0, True, 9), 8), (NoteLayout(2, True, 9), 16)):
        assert layout.block_bytes(cache, BLOCK) == per_entry * BLOCK
    assert make_store(memory_size=3).row_bytes == 4 * 2 * (2 + 3)


def test_places_are_those_of_the_block_tables(tables: torch.Tensor) -> None:
    places = places_of(tables, LENGTHS, 12, BLOCK)
    for sequence in range(2):
        for head in range(HEADS):
            table, length = tables[sequence, head].tolist(), int(LENGTHS[sequence, head])
            expected = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)]
            assert places[sequence, head].tolist() == expected + [table[0] * BLOCK] * (12 - length)


def test_entries_move_to_their_ages(tables: torch.Tensor, random: torch.Generator) -> None:
    pages = [torch.randn(BLOCKS, BLOCK, HEAD_DIM, generator=random) for _ in range(2)]
    slot = torch.full((BLOCKS, BLOCK), 99, dtype=torch.int32)
    expected = {}
    for sequence in range(2):
        for head in range(HEADS):
            table, length = tables[sequence, head].tolist(), int(LENGTHS[sequence, head])
            order = torch.randperm(length, generator=random).tolist()
            for age, where in enumerate(order):
                slot[table[age // BLOCK], age % BLOCK] = where
            held = [entries_of(each, table, length) for each in pages]
            expected[sequence, head] = [[each[where] for where in order] for each in held]
    owned = torch.zeros(BLOCKS, dtype=torch.bool)
    owned[tables.flatten().long()] = True
    others = [each[~owned].clone() for each in pages]
    rewrite_in_order(pages, slot, tables, LENGTHS)
    for (sequence, head), held in expected.items():
        table, length = tables[sequence, head].tolist(), int(LENGTHS[sequence, head])
        assert [entries_of(each, table, length) for each in pages] == held
        assert entries_of(slot, table, length) == list(range(length))
    assert all(torch.equal(each[~owned], other) for each, other in zip(pages, others, strict=True))


@pytest.mark.parametrize("num_sums", [0, 2])
def test_what_stays_moves_together(num_sums: int, tables: torch.Tensor, random: torch.Generator) -> None:
    store = make_store(num_sums)
    store.position.copy_(torch.arange(BLOCKS * BLOCK).view(BLOCKS, BLOCK))
    store.sums.copy_(torch.rand(num_sums, BLOCKS, BLOCK, generator=random))
    keep = torch.rand(2, HEADS, 12, generator=random) < 0.5
    keep[0, 1], keep[1, 2] = True, False  # all, and none
    keep &= torch.arange(12) < LENGTHS[..., None]
    notes = [store.position, *store.sums]
    expected = {}
    for sequence, head in torch.cartesian_prod(torch.arange(2), torch.arange(HEADS)).tolist():
        stays = keep[sequence, head].nonzero().flatten().tolist()
        held = [entries_of(note, tables[sequence, head], 12) for note in notes]
        expected[sequence, head] = [[each[age] for age in stays] for each in held]
    store.compact(tables, keep)
    for (sequence, head), held in expected.items():
        length = int(keep[sequence, head].sum())
        assert [entries_of(note, tables[sequence, head], length) for note in notes] == held


@pytest.mark.parametrize("keeps_slots", [True, False])
def test_a_store_that_grows_keeps_what_it_holds(keeps_slots: bool) -> None:
    store = make_store(keeps_slots=keeps_slots, num_blocks=3)
    store.position += 7
    store.sums += torch.tensor([1.0, 2.0])[:, None, None]
    store.grow(8)
    pages = store.pages
    assert pages.position.shape == (8, BLOCK) and pages.sums.shape == (2, 8, BLOCK)
    assert (pages.position[:3] == 7).all() and not pages.position[3:].any()
    assert (pages.sums[1, :3] == 2).all() and not pages.sums[:, 3:].any()
    assert (pages.slot is not None) == keeps_slots
    if pages.slot is not None:
        assert pages.slot.shape == (8, BLOCK)


def test_a_reused_row_starts_without_memory() -> None:
    store = make_store()
    for numbers in (store.limits, store.nominal, store.memory):
        numbers.fill_(5)
    store.open_row(2)
    assert not store.limits[:, 2].any() and not store.nominal[:, 2].any() and store.memory[:, 2].isnan().all()
    assert (store.memory[:, [0, 1, 3, 4]] == 5).all() and (store.limits[:, [0, 1, 3, 4]] == 5).all()
