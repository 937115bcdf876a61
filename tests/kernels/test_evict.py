"""What every backend does after a generated token, against python lists of slots and blocks: note what it attends to,
choose what goes, evict it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from oracles.backends import backends_here
from oracles.cache_layers import fill, make_layer
from torch import Tensor

from dmc.kernels import load_backend
from dmc.kernels.base import NewTokens
from dmc.kernels.batch import ForwardBatch

LENGTHS = [[0, 1], [15, 16], [17, 80]]
HEAD_DIM, BLOCK, STEPS = 32, 16, 36
SUMS, POWERS = ["mass", "squares", "value_norm"], {"mass": 1, "squares": 2}


@pytest.fixture(params=backends_here(HEAD_DIM))
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return load_backend(request.param)


@dataclass
class Entry:
    key: Tensor
    value: Tensor
    position: int
    sums: list[float]


@dataclass
class Head:
    """What one head should hold, slot by slot."""

    entries: list[Entry] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def append(self, entry: Entry, stack: list[int]) -> None:
        if len(self.entries) == BLOCK * len(self.blocks):
            self.blocks.append(stack.pop())
        self.entries.append(entry)

    def evict(self, slot: int, stack: list[int]) -> None:
        if slot < 0:
            return
        self.entries[slot] = self.entries[-1]  # what lies in the last slot moves to where the evicted one lay
        del self.entries[-1]
        if len(self.entries) <= BLOCK * (len(self.blocks) - 1):
            stack.append(self.blocks.pop())


class Simulation:
    """A layer with metadata, and what should be in it."""

    def __init__(self, backend: ModuleType, dtype: torch.dtype) -> None:
        self.backend, self.dtype = backend, dtype
        self.generator = torch.Generator().manual_seed(1)
        self.layer = fill(
            make_layer(None, head_dim=HEAD_DIM, max_blocks=9, block_size=BLOCK, dtype=dtype), torch.tensor(LENGTHS)
        )
        pages = self.layer.key_pages.shape[:2]
        self.layer.entry_metadata = {"position": torch.full(pages, -7, dtype=torch.int32)}
        self.layer.entry_metadata |= {name: torch.full(pages, -7.0) for name in SUMS}
        self.stack = self.layer.free_blocks[: int(self.layer.num_free)].tolist()
        self.heads = [[self.filled(row, head) for head in range(2)] for row in range(3)]
        self.positions = [80, 80, 80]

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def place(self, row: int, head: int, slot: int) -> tuple[int, int]:
        return int(self.layer.block_tables[row, head, slot // BLOCK]), slot % BLOCK

    def filled(self, row: int, head: int) -> Head:
        result = Head(blocks=self.layer.block_tables[row, head, : -(-LENGTHS[row][head] // BLOCK)].tolist())
        for slot in range(LENGTHS[row][head]):
            place = self.place(row, head, slot)
            key, value = self.layer.key_pages[place].clone(), self.layer.value_pages[place].clone()
            entry = Entry(key, value, 3 * slot, self.noise(len(SUMS)).tolist())
            result.entries.append(entry)
            for name, number in zip(["position", *SUMS], [entry.position, *entry.sums], strict=True):
                self.layer.entry_metadata[name][place] = number
        return result

    def append(self, rows: list[int], count: int | list[int] = 1) -> None:
        counts = [count] * len(rows) if isinstance(count, int) else count
        batch = ForwardBatch(rows, [self.positions[row] for row in rows], counts)
        key, value = (self.noise(batch.num_tokens, 2, HEAD_DIM).to(self.dtype) for _ in range(2))
        sums = self.noise(len(SUMS), batch.num_tokens, 2)
        self.backend.append_or_merge(self.layer, batch, NewTokens(key, value), None)
        metadata = {"position": batch.positions.int()[:, None].repeat(1, 2), **dict(zip(SUMS, sums, strict=True))}
        self.backend.write_metadata(self.layer, batch, metadata)
        for row, span in zip(rows, batch.spans, strict=True):
            for head, expected in enumerate(self.heads[row]):
                for token in range(span.start, span.stop):
                    position = self.positions[row] + token - span.start
                    fields = key[token, head], value[token, head], position, sums[:, token, head].tolist()
                    expected.append(Entry(*fields), self.stack)
            self.positions[row] += span.stop - span.start

    def evict(self, rows: list[int], slots: list[list[int]]) -> None:
        self.backend.evict(self.layer, torch.tensor(rows), torch.tensor(slots))
        for row, of_row in zip(rows, slots, strict=True):
            for expected, slot in zip(self.heads[row], of_row, strict=True):
                expected.evict(slot, self.stack)

    def random_slot(self, row: int, head: int) -> int:
        """None, the last, the first, or any."""
        length = len(self.heads[row][head].entries)
        kind = int(torch.randint(5, (), generator=self.generator))
        anywhere = int(torch.randint(length, (), generator=self.generator))
        return [-1, length - 1, 0, anywhere, anywhere][kind]

    def check(self) -> None:
        layer = self.layer
        assert layer.free_blocks[: int(layer.num_free)].tolist() == self.stack
        assert len(set(self.stack)) == len(self.stack)
        for row in range(3):
            for head, expected in enumerate(self.heads[row]):
                length = len(expected.entries)
                assert int(layer.lengths[row, head]) == length
                assert len(expected.blocks) == -(-length // BLOCK)
                assert layer.block_tables[row, head, : len(expected.blocks)].tolist() == expected.blocks
                if length == 0:
                    continue
                slots = tuple(torch.tensor([self.place(row, head, slot) for slot in range(length)]).T)
                assert layer.entry_metadata["position"][slots].tolist() == [
                    entry.position for entry in expected.entries
                ]
                for i, name in enumerate(SUMS):
                    sums = torch.tensor([entry.sums[i] for entry in expected.entries])
                    torch.testing.assert_close(layer.entry_metadata[name][slots], sums, rtol=1e-5, atol=1e-5)
                assert torch.equal(layer.key_pages[slots], torch.stack([entry.key for entry in expected.entries]))
                assert torch.equal(layer.value_pages[slots], torch.stack([entry.value for entry in expected.entries]))

    def attend(self, rows: list[int]) -> None:
        """Compare attention with softmax over the entries, add it to the sums, and read what is kept of them."""
        query = self.noise(len(rows), 4, HEAD_DIM).to(self.dtype)
        pages = self.layer.key_pages, self.layer.value_pages, self.layer.block_tables
        tolerance = 2e-5 if self.dtype == torch.float32 else 2e-2
        index, longest = torch.tensor(rows), int(self.layer.lengths[rows].max())
        out, scores = self.backend.paged_attention(
            query, *pages, self.layer.lengths, 0.3, rows=index, return_scores=True
        )
        attention = self.backend.add_attention(self.layer, index, scores, POWERS, longest)
        positions, *sums = self.backend.read_metadata(self.layer, index, ["position", *SUMS], longest)
        for sequence, row in enumerate(rows):
            for head, expected in enumerate(self.heads[row]):
                length = len(expected.entries)
                key, value = (
                    torch.stack([getattr(entry, name) for entry in expected.entries]).double()
                    for name in ("key", "value")
                )
                group = slice(2 * head, 2 * head + 2)
                weights = (0.3 * query[sequence, group].double() @ key.T).softmax(-1)
                torch.testing.assert_close(out[sequence, group].double(), weights @ value, rtol=0, atol=tolerance)
                mean = weights.mean(0)
                torch.testing.assert_close(attention[sequence, head, :length].double(), mean, rtol=0, atol=1e-5)
                for entry, received in zip(expected.entries, mean.tolist(), strict=True):
                    entry.sums = [entry.sums[0] + received, entry.sums[1] + received**2, entry.sums[2]]
                read = torch.stack(sums)[:, sequence, head]
                wanted = torch.tensor([entry.sums for entry in expected.entries]).T
                torch.testing.assert_close(read[:, :length], wanted, rtol=1e-5, atol=1e-5)
                assert not attention[sequence, head, length:].any() and not read[:, length:].any()
                assert positions[sequence, head, :length].tolist() == [entry.position for entry in expected.entries]
                assert (positions[sequence, head, length:] == -1).all()


ORDERS = [[0, 1, 2], [2, 0], [1], [2, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_entries_blocks_and_the_free_stack_are_those_of_python_lists(backend: ModuleType, dtype: torch.dtype) -> None:
    if backend.supports(dtype, HEAD_DIM, BLOCK, torch.device("cpu")) is not None:
        pytest.skip("not supported")
    simulation = Simulation(backend, dtype)
    for step in range(STEPS):
        rows = ORDERS[step % len(ORDERS)]
        simulation.append(rows)
        if step % 6 == 0:
            simulation.attend(rows)
        simulation.evict(rows, [[simulation.random_slot(row, head) for head in range(2)] for row in rows])
        simulation.check()


def test_metadata_of_many_tokens_go_to_the_blocks_they_are_in(backend: ModuleType) -> None:
    simulation = Simulation(backend, torch.float32)
    simulation.append([2, 0], [37, 20])
    simulation.append([1], 1)
    simulation.check()


@pytest.mark.parametrize("slot", ["first", "last", "none"])
def test_what_always_goes_leaves_what_never_does(backend: ModuleType, slot: str) -> None:
    simulation = Simulation(backend, torch.float32)
    before = [[[entry.position for entry in head.entries] for head in row] for row in simulation.heads]
    for _ in range(4):
        simulation.append([0, 1, 2])
        slots = [
            [{"first": 0, "last": len(head.entries) - 1, "none": -1}[slot] for head in row] for row in simulation.heads
        ]
        simulation.evict([0, 1, 2], slots)
    simulation.check()
    for row in range(3):
        for head, old in enumerate(before[row]):
            new = list(range(80, 84))
            kept = {"first": [83, *old[1:]] if old else [], "last": old, "none": old + new}[slot]
            assert [entry.position for entry in simulation.heads[row][head].entries] == kept


def test_heads_of_other_rows_are_untouched(backend: ModuleType) -> None:
    simulation = Simulation(backend, torch.float32)
    tables, lengths = simulation.layer.block_tables.clone(), simulation.layer.lengths.clone()
    simulation.append([1])
    simulation.evict([1], [[3, 16]])
    simulation.check()
    for row in (0, 2):
        assert torch.equal(simulation.layer.block_tables[row], tables[row])
    assert torch.equal(simulation.layer.lengths, lengths)


def test_the_youngest_of_the_lowest_goes_where_there_are_too_many(backend: ModuleType) -> None:
    inf, nan = torch.inf, torch.nan
    scores = [
        [3.0, 1.0, 2.0, 1.0, inf, nan, -5.0],
        [inf, inf, inf, inf, inf, inf, inf],
        [4.0, inf, inf, inf, inf, inf, 0.0],
        [-1.0, -2.0, 0.0, -2.0, -3.0, 7.0, 7.0],
    ]
    positions = torch.tensor(
        [[4, 9, 1, 3, 0, 8, 7], [2, 9, 6, 3, 4, 5, 1], [0, 1, 2, 3, 4, 5, 6], [3, 2, 1, 0, 9, 9, 9]]
    )
    lengths = torch.tensor([[5, 7], [6, 4]])
    limits = torch.tensor([4, 4])
    found = backend.eviction_candidate(
        torch.tensor(scores).view(2, 2, 7), positions.int().view(2, 2, 7), lengths, limits
    )
    assert found.tolist() == [[1, 1], [0, -1]]


def test_the_lowest_are_found_in_scores_that_heads_or_sequences_share(backend: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 300, (3, 4), generator=generator)
    limits = torch.tensor([1, 100, 299])
    positions = torch.stack([torch.randperm(999, generator=generator)[:300] for _ in range(12)]).view(3, 4, 300).int()
    for shape in ((3, 4, 300), (3, 1, 300), (1, 4, 300), (300,)):
        scores = torch.randint(50, shape, generator=generator).float().expand(3, 4, 300)
        found = backend.eviction_candidate(scores, positions, lengths, limits)
        for sequence in range(3):
            for head in range(4):
                head_scores = scores[sequence, head, : int(lengths[sequence, head])].tolist()
                lowest = [slot for slot, score in enumerate(head_scores) if score == min(head_scores)]
                youngest = max(lowest, key=positions[sequence, head].tolist().__getitem__)
                assert int(found[sequence, head]) == (youngest if len(head_scores) > int(limits[sequence]) else -1)


def test_the_nth_newest_position_is_that_of_a_sorted_list(backend: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.full((2, 3, 50), -1, dtype=torch.int32)
    held = [[torch.randperm(2000, generator=generator)[:length].tolist() for length in (1, 17, 50)] for _ in range(2)]
    for sequence in range(2):
        for head in range(3):
            positions[sequence, head, : len(held[sequence][head])] = torch.tensor(held[sequence][head])
    for count in (-3, 0, 1, 16, 17, 51):
        found = backend.nth_newest(positions, torch.full((2, 3), count))
        for sequence in range(2):
            for head, head_positions in enumerate(held[sequence]):
                newest = sorted(head_positions, reverse=True)[: max(count, 0)]
                threshold = int(found[sequence, head])
                assert (
                    sorted([position for position in head_positions if position >= threshold], reverse=True) == newest
                    and threshold >= 0
                )
