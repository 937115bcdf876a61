import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmc.compression import CompressionConfig
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.reference import take_blocks
from dmc.ranks import Ranks
from dmc.runtime.allocator import OutOfBlocksError
from dmc.runtime.paged_cache import PagedCache

LAYERS, HEADS, HEAD_DIM, BLOCK = 2, 3, 4, 16


def make_layout(**gates):
    compression = CompressionConfig(**gates) if gates else None
    return CacheLayout(LAYERS, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"), compression)


def make_cache(num_sequences=3, num_blocks=None, **gates):
    return PagedCache(make_layout(**gates), num_sequences, BLOCK, num_blocks)


def fill(cache, row, lengths):
    """Let the heads of a row hold `lengths` [L, H] entries; the new ones name their row and place."""
    old = cache.lengths[:, row].tolist()
    cache.reserve([row], [int((lengths - cache.lengths[:, row]).max())])
    for layer in range(LAYERS):
        take_blocks(cache.layer(layer), torch.tensor([row]), lengths[layer][None])
        tables = cache.block_tables[layer, row][None]
        for head in range(HEADS):
            for slot in range(old[layer][head], int(lengths[layer, head])):
                block = int(tables[0, head, slot // BLOCK])
                cache.fields["key_pages"][block, slot % BLOCK] = 1000 * row + 100 * layer + 10 * head + slot / 100
    cache.tokens_seen[row] = int(lengths.max())


def held(cache, row):
    """Read every head's entries back through its block table."""
    return [
        [
            [
                cache.fields["key_pages"][cache.block_tables[layer, row, head, slot // BLOCK], slot % BLOCK, 0].item()
                for slot in range(int(cache.lengths[layer, row, head]))
            ]
            for head in range(HEADS)
        ]
        for layer in range(LAYERS)
    ]


def num_blocks(lengths):
    return int((-(-lengths // BLOCK)).sum())


@pytest.mark.parametrize(
    ("gates", "history", "keeps_mean"),
    [
        ({}, 0, False),
        ({"window_size": 12}, 11, False),
        ({"window_size": 1}, 0, False),
        ({"window_size": 3, "delay": 4}, 6, False),
        ({"window_size": None}, 0, True),
        ({"window_size": None, "delay": 4}, 4, True),
        ({"action": "drop", "delay": 16}, 16, False),
        ({"action": "drop", "delay": 16, "window_size": None}, 16, False),
    ],
)
def test_history_is_what_delay_and_window_need(gates, history, keeps_mean):
    layout = make_layout(**gates)
    assert (layout.history_size, layout.keeps_mean) == (history, keeps_mean)


def test_bytes_count_pages_state_and_tables():
    cache = make_cache(window_size=None, delay=2)
    row = cache.open_row()
    lengths = torch.tensor([[1, 16, 17], [33, 5, 90]])
    fill(cache, row, lengths)
    entry = 2 * HEAD_DIM * 4
    history = 2 * (entry + 1 + 4)  # raw keys and values, decision, importance
    state = LAYERS * HEADS * (history + (2 * HEAD_DIM + 1) * 4 + 4 + 4 * cache.block_tables.shape[-1])
    assert cache.bytes_used(row) == int(lengths.sum()) * entry + state
    assert cache.bytes_allocated(row) == num_blocks(lengths) * BLOCK * entry + state
    assert torch.equal(cache.slots(row), lengths + 2)


def test_slots_count_raw_tokens_that_exist():
    cache = make_cache(action="drop", delay=5)
    row = cache.open_row()
    cache.tokens_seen[row] = 3
    assert torch.equal(cache.slots(row), torch.full((LAYERS, HEADS), 3))


def test_a_reused_row_starts_empty():
    cache = make_cache(1, window_size=None)
    row = cache.open_row()
    fill(cache, row, torch.full((LAYERS, HEADS), 20))
    cache.fields["weight"][:, row] = 7
    cache.close_row(row)
    assert cache.open_row() == row
    assert not cache.lengths.any()
    assert not cache.fields["weight"].any()
    assert not cache.tokens_seen.any()


def test_a_fixed_pool_refuses_before_anything_changes():
    cache = make_cache(num_blocks=LAYERS * HEADS * 2)
    row = cache.open_row()
    fill(cache, row, torch.full((LAYERS, HEADS), 16))
    before = cache.block_tables.clone(), cache.lengths.clone(), cache.fields["key_pages"].clone()
    cache.reserve([row], [16])
    with pytest.raises(OutOfBlocksError, match="6 more blocks may be needed than the 6 of 12 that are free"):
        cache.reserve([row], [17])
    assert all(
        torch.equal(*pair) for pair in zip(before, (cache.block_tables, cache.lengths, cache.fields["key_pages"]))
    )
    assert cache.allocator.num_in_use == 6


def test_a_pool_without_a_limit_grows_and_keeps_its_contents():
    cache = make_cache()
    row = cache.open_row()
    fill(cache, row, torch.full((LAYERS, HEADS), 40))
    before = held(cache, row)
    cache.make_room([16 * 1000] * 2)
    assert cache.allocator.num_free >= 2 * HEADS * 1000
    assert cache.fields["key_pages"].shape[0] == cache.fields["value_pages"].shape[0] == cache.allocator.num_blocks
    assert held(cache, row) == before


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_history_of_rows_and_snapshots_keeps_each_ones_entries(data):
    cache = make_cache(4)
    open_rows = {}
    snapshots = {}
    for _ in range(data.draw(st.integers(1, 12))):
        choices = ["open"] * (cache.num_free_rows > 0) + ["close", "extend", "snapshot", "move"] * bool(open_rows)
        choices += ["drop"] * bool(snapshots) + ["fork"] * (cache.num_free_rows > 0 and bool(snapshots))
        verb = data.draw(st.sampled_from(choices))
        row = data.draw(st.sampled_from(sorted(open_rows))) if open_rows else -1
        snapshot = data.draw(st.sampled_from(list(snapshots))) if snapshots else None
        if verb == "open":
            open_rows[cache.open_row()] = [[[]] * HEADS] * LAYERS
        elif verb == "close":
            cache.close_row(row)
            del open_rows[row]
        elif verb == "extend":
            more = data.draw(st.lists(st.integers(0, 20), min_size=LAYERS * HEADS, max_size=LAYERS * HEADS))
            lengths = cache.lengths[:, row].long() + torch.tensor(more).view(LAYERS, HEADS)
            kept = open_rows[row]
            fill(cache, row, lengths)
            open_rows[row] = held(cache, row)
            for layer, head in ((layer, head) for layer in range(LAYERS) for head in range(HEADS)):
                assert open_rows[row][layer][head][: len(kept[layer][head])] == kept[layer][head]
        elif verb in ("snapshot", "move"):
            snapshots[cache.snapshot(row, moves=verb == "move")] = open_rows[row]
            if verb == "move":
                del open_rows[row]
        elif verb == "drop":
            cache.drop(snapshot)
            del snapshots[snapshot]
        else:
            open_rows[cache.open_row(snapshot)] = snapshots[snapshot]
        for row, entries in open_rows.items():
            assert held(cache, row) == entries
        by_rows = {block for row in open_rows for block in cache._owned_blocks(row).tolist()}
        tables = [(snapshot.states["block_tables"], snapshot.states["lengths"]) for snapshot in snapshots]
        by_snapshots = {block for table in tables for block in cache._blocks_of(*table).tolist()}
        assert cache.allocator.num_in_use == len(by_rows | by_snapshots)
        assert cache.blocks_only_in(snapshots) == len(by_snapshots - by_rows)
        assert not cache.lengths[:, [row for row in range(4) if row not in open_rows]].any()
    for row in open_rows:
        cache.close_row(row)
    for snapshot in snapshots:
        cache.drop(snapshot)
    assert cache.allocator.num_in_use == 0 and not cache.allocator.extra.any()


@pytest.mark.parametrize(
    ("gates", "length", "num_copied"),
    [
        ({}, 16, 0),
        ({}, 20, 1),
        ({"window_size": 3}, 16, 1),
        ({"window_size": 3}, 33, 1),
        ({"action": "drop", "delay": 4}, 32, 0),
        ({"action": "drop", "delay": 4}, 31, 1),
    ],
)
def test_forks_share_all_blocks_but_those_that_may_still_change(gates, length, num_copied):
    cache = make_cache(2, **gates)
    row = cache.open_row()
    fill(cache, row, torch.full((LAYERS, HEADS), length))
    for name in ("history_key", "history_omega"):
        cache.fields[name][:, row] = 5
    snapshot = cache.snapshot(row)
    fork = cache.open_row(snapshot)
    cache.drop(snapshot)
    assert held(cache, row) == held(cache, fork)
    assert cache.allocator.num_in_use == LAYERS * HEADS * (-(-length // BLOCK) + num_copied)
    assert all((cache.fields[name][:, fork] == 5).all() for name in ("history_key", "history_omega"))
    assert cache.tokens_seen.tolist() == [length, length]
    fill(cache, fork, torch.full((LAYERS, HEADS), length + 20))
    before = held(cache, row)
    cache.close_row(fork)
    assert held(cache, row) == before
    assert cache.allocator.num_in_use == LAYERS * HEADS * -(-length // BLOCK)


def test_a_pool_without_room_for_copies_forks_nothing():
    cache = make_cache(2, num_blocks=LAYERS * HEADS * 2)
    row = cache.open_row()
    fill(cache, row, torch.full((LAYERS, HEADS), 20))
    with pytest.raises(OutOfBlocksError):
        cache.snapshot(row)
    assert (cache.num_free_rows, cache.allocator.num_free) == (1, 0) and not cache.allocator.extra.any()


DECLARED = (
    Field("mass", torch.float32, "slot"),
    Field("bound", torch.bfloat16, "block", (HEAD_DIM,), every=5),
    Field("threshold", torch.float32, "row", (3,), start=torch.nan),
    Field("chosen", torch.int32, "row", (0,), start=-1, num_layers=1),
)


def cache_of_declared_fields():
    layout = dataclasses.replace(make_layout(), policy_fields=DECLARED)
    return PagedCache(layout, 3, BLOCK)


def test_declared_fields_have_their_shapes_and_are_counted():
    cache, plain = cache_of_declared_fields(), make_cache()
    shapes = {"mass": (256, BLOCK), "bound": (256, 4, HEAD_DIM), "threshold": (LAYERS, 3, 3), "chosen": (1, 3, 0)}
    assert {name: tuple(cache.fields[name].shape) for name in shapes} == shapes
    assert cache.block_bytes == plain.block_bytes + 4 * BLOCK + 4 * HEAD_DIM * 2
    assert cache.state_bytes == plain.state_bytes + LAYERS * 3 * 4
    assert list(cache.layer(1).entry_metadata) == ["mass"]
    cache.fields.widen("chosen", 5)
    assert (cache.fields["chosen"] == -1).all() and cache.state_bytes == plain.state_bytes + LAYERS * 3 * 4 + 5 * 4


def test_declared_fields_grow_and_are_copied_and_forgotten_with_what_they_belong_to():
    cache = cache_of_declared_fields()
    rows = [cache.open_row(), cache.open_row()]
    fill(cache, rows[0], torch.full((LAYERS, HEADS), 20))
    tables = cache.block_tables[:, rows[0], :, :2].long()
    cache.fields["mass"][tables] = 1 + torch.arange(tables.numel()).view(*tables.shape, 1).float()
    cache.fields["bound"][tables] = 2.0
    cache.fields["threshold"][:, rows[0]] = 3.0
    before = cache.fields["mass"][tables].clone()
    cache._grow_pool(1000)
    assert torch.equal(cache.fields["mass"][tables], before)
    assert len(cache.fields["mass"]) == len(cache.fields["bound"]) == cache.allocator.num_blocks > 1000
    cache.close_row(rows[1])
    assert cache.open_row(cache.snapshot(rows[0])) == rows[1]
    copied = cache.block_tables[:, rows[1], :, :2].long()
    assert not set(copied.flatten().tolist()) & set(tables.flatten().tolist())
    assert torch.equal(cache.fields["mass"][copied], before) and (cache.fields["bound"][copied] == 2).all()
    assert (cache.fields["threshold"][:, rows] == 3).all()
    cache.close_row(rows[1])
    assert cache.open_row() == rows[1]
    assert cache.fields["threshold"][:, rows[1]].isnan().all() and (cache.fields["threshold"][:, rows[0]] == 3).all()


class Counting(Ranks):
    """One of two ranks, that counts what it asks the other."""

    num_asked = 0

    def all_reduce(self, value, op="sum"):
        type(self).num_asked += 1
        return value


def test_ranks_whose_pools_have_grown_apart_ask_each_other_alike_after_a_reset():
    asked = []
    for length in (10, 4000):

        class Rank(Counting):
            pass

        cache = PagedCache(dataclasses.replace(make_layout(), ranks=Rank()), 3, BLOCK)
        cache.reserve([cache.open_row()], [length])
        cache.make_room([length])
        cache.reset()
        Rank.num_asked = 0
        row = cache.open_row()
        for num_new in (1000, 100, 1):
            cache.would_grow([row], [num_new])
            cache.reserve([row], [num_new])
        asked.append(Rank.num_asked)
    assert asked[0] == asked[1]
