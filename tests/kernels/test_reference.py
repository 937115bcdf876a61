import math

import numpy as np
import pytest
import torch
from covering import cover
from oracles.cache_layers import THETA, make_layer, rotary_tables
from oracles.step_by_step import HeadOracle

from dmc.compression import CompressionConfig
from dmc.kernels import load_backend, reference
from dmc.kernels.base import NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.reference import append_or_merge, gather_pages, paged_attention, prefill_attention

HEAD_DIM, BLOCK = 8, 16
TOLERANCE = 1e-5


def random_pages(lengths: torch.Tensor, capacity: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Make pages full of noise and a table that scatters each head's blocks over them."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = lengths.numel() * capacity
    key, value = (torch.randn(num_blocks + 3, BLOCK, HEAD_DIM, generator=generator) for _ in range(2))
    tables = torch.randperm(num_blocks + 3, generator=generator)[:num_blocks].int().view(*lengths.shape, capacity)
    return key, value, tables


def naive_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    batch, query_heads, _ = query.shape
    group = query_heads // lengths.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row in range(batch):
        for head in range(query_heads):
            kv_head = head // group
            scores, values = [], []
            for slot in range(int(lengths[row, kv_head])):
                block = int(tables[row, kv_head, slot // BLOCK])
                score = float(query[row, head].double() @ key[block, slot % BLOCK].double()) / math.sqrt(HEAD_DIM)
                scores.append(score if bias is None else score + float(bias[block, slot % BLOCK]))
                values.append(value[block, slot % BLOCK].double())
            if scores:
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                out[row, head] = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return out


@pytest.mark.parametrize("group", [1, 2, 4])
def test_paged_attention_equals_loops_over_slots_at_every_page_boundary(group: int) -> None:
    lengths = torch.tensor([[1, 0, 15], [16, 17, 31], [32, 33, 48]], dtype=torch.int32)
    key, value, tables = random_pages(lengths, capacity=3)
    query = torch.randn(3, 3 * group, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    for bias in (None, torch.randn(key.shape[:2], generator=torch.Generator().manual_seed(2))):
        out = paged_attention(query, key, value, tables, lengths, HEAD_DIM**-0.5, bias=bias)
        expected = naive_attention(query, key, value, tables, lengths, bias)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE)
        assert not out[0, group : 2 * group].any()


def test_a_batch_of_empty_heads_gives_zeros() -> None:
    lengths = torch.zeros(2, 2, dtype=torch.int32)
    key, value, tables = random_pages(lengths, capacity=1)
    assert not paged_attention(torch.ones(2, 4, HEAD_DIM), key, value, tables, lengths, 1.0).any()


def test_what_lies_beyond_the_length_is_never_read() -> None:
    lengths = torch.tensor([[5, 20]], dtype=torch.int32)
    key, value, tables = random_pages(lengths, capacity=2)
    query = torch.randn(1, 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    expected = paged_attention(query, key, value, tables, lengths, 1.0)
    for pages in (key, value):
        pages[tables[0, 0, 0], 5:] = 1e4
        pages[tables[0, 1, 1], 4:] = -1e4
    tables[0, 0, 1] = 0
    torch.testing.assert_close(paged_attention(query, key, value, tables, lengths, 1.0), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_pages_are_attended_in_float32(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[17, 3]], dtype=torch.int32)
    key, value, tables = random_pages(lengths, capacity=2)
    query = torch.randn(1, 4, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    out = paged_attention(query, key, value, tables, lengths, 0.5)
    expected = paged_attention(query.float(), key.float(), value.float(), tables, lengths, 0.5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)


class Stream:
    """Random tokens of some sequences and heads, fed piece by piece as the runtime would, and their oracle."""

    def __init__(self, config: CompressionConfig, sequences: int = 2, heads: int = 3, time: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (sequences, heads, time)
        self.config, self.shape, self.ends = config, shape, [0] * sequences
        self.key, self.value = (torch.randn(*shape, HEAD_DIM, generator=generator) for _ in range(2))
        self.key[..., -1] = 0
        self.decisions = torch.rand(shape, generator=generator) < 0.6
        self.omega = torch.rand(shape, generator=generator) + 0.01
        self.rows = [2, 0]  # of a cache with a row that nobody uses
        self.cache = make_layer(config, num_rows=3, kv_heads=heads, head_dim=HEAD_DIM, max_blocks=-(-time // BLOCK))

    def feed(self, *ends: int) -> tuple[ForwardBatch, VisibleKeys]:
        """Feed each sequence its tokens up to here, those that it has not had."""
        members = [i for i, end in enumerate(ends) if end > self.ends[i]]
        begins, rows = [self.ends[i] for i in members], [self.rows[i] for i in members]
        batch = ForwardBatch(rows, begins, [ends[i] - self.ends[i] for i in members])
        batch.rotary = rotary_tables(batch.extended(self.config.delay).positions, HEAD_DIM)
        place = torch.tensor(members)[batch.sequence], slice(None), batch.positions
        states = (tensor[place] for tensor in (self.key, self.value, self.decisions, self.omega))
        self.ends = list(ends)
        return batch, append_or_merge(self.cache, batch, NewTokens(*states), self.config)

    def oracle(self, sequence: int, head: int, end: int) -> list[tuple[np.ndarray, np.ndarray]]:
        oracle = HeadOracle(self.config, HEAD_DIM, THETA)
        for token in range(end - self.config.delay):
            oracle.enter(
                {
                    "key": self.key[sequence, head, token].double().numpy(),
                    "value": self.value[sequence, head, token].double().numpy(),
                    "omega": float(self.omega[sequence, head, token]),
                    "decision": bool(self.decisions[sequence, head, token]) and token > 0,
                    "position": token,
                }
            )
        return oracle.slots

    def check(self) -> None:
        lengths, tables = self.cache.lengths[self.rows], self.cache.block_tables[self.rows]
        keys = gather_pages(self.cache.key_pages, tables, int(lengths.max()))
        values = gather_pages(self.cache.value_pages, tables, int(lengths.max()))
        held = [
            tables[sequence, head, : -(-int(lengths[sequence, head]) // BLOCK)].tolist()
            for sequence in range(self.shape[0])
            for head in range(self.shape[1])
        ]
        free = self.cache.free_blocks[: int(self.cache.num_free)].tolist()
        assert sorted(sum(held, free)) == list(range(self.cache.free_blocks.numel()))
        assert not self.cache.lengths[1].any()
        for sequence in range(self.shape[0]):
            for head in range(self.shape[1]):
                slots = self.oracle(sequence, head, self.ends[sequence])
                assert int(lengths[sequence, head]) == len(slots)
                for slot, (key, value) in enumerate(slots):
                    place = (sequence, head, slot)
                    torch.testing.assert_close(keys[place].double(), torch.from_numpy(key), rtol=0, atol=TOLERANCE)
                    torch.testing.assert_close(values[place].double(), torch.from_numpy(value), rtol=0, atol=TOLERANCE)


PIECES = {
    "whole": [(40, 40)],
    "one by one": [(1, 1)] * 40,
    "uneven": [(count, count) for count in (3, 1, 1, 17, 2, 16)],
    "ragged": [(1, 3), (7, 1), (0, 12), (30, 1), (1, 23), (1, 0)],
}


@pytest.mark.parametrize(
    ("action", "window_size", "delay", "pieces"),
    [
        *(("merge", *row) for row in cover((1, 3, 12, None), (0, 1, 4, 16), tuple(PIECES))),
        *(("drop", 12, *row) for row in ((1, "ragged"), (4, "uneven"), (4, "one by one"), (16, "whole"))),
    ],
)
def test_pages_hold_what_the_oracle_holds_after_every_piece(
    action: str, window_size: int | None, delay: int, pieces: str
) -> None:
    stream = Stream(CompressionConfig(action=action, window_size=window_size, delay=delay))
    for counts in PIECES[pieces]:
        ends = [end + count for end, count in zip(stream.ends, counts, strict=True)]
        stream.feed(*ends)
        if 40 in ends or ends[0] % 7 == 0 or max(counts) > 1:
            stream.check()
    assert stream.ends[1] == 40


def test_scores_are_the_probabilities_of_the_slots() -> None:
    lengths = torch.tensor([[0, 17], [3, 16]], dtype=torch.int32)
    key, value, tables = random_pages(lengths, capacity=3)
    query = torch.randn(2, 4, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    out, scores = paged_attention(query, key, value, tables, lengths, 0.5, return_scores=True)
    assert scores.shape == (2, 4, 3 * BLOCK)
    values = gather_pages(value, tables, 3 * BLOCK).repeat_interleave(2, dim=1)
    torch.testing.assert_close((scores[..., None] * values).sum(2), out, rtol=0, atol=TOLERANCE)
    held = torch.arange(3 * BLOCK) < lengths.repeat_interleave(2, dim=1)[..., None]
    assert not scores[~held].any()
    torch.testing.assert_close(scores.sum(-1), held.any(-1).float(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "gates",
    [
        *({"delay": 0}, {"delay": 5, "window_size": None}, {"action": "drop", "delay": 5}),
        *(pytest.param(gates, marks=pytest.mark.slow) for gates in ({"delay": 5}, {"window_size": None})),
    ],
    ids=str,
)
def test_a_piece_attends_as_its_tokens_one_by_one(gates: dict) -> None:
    config = CompressionConfig(**gates)
    together, single = Stream(config), Stream(config)
    query = torch.randn(2, 40, 6, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    for ends in ((3, 1), (4, 25), (40, 40)):
        before = together.ends
        batch, seen = together.feed(*ends)
        layer = together.cache
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        new_query = torch.cat([query[i, before[i] : ends[i]] for i in range(2)])
        out = batch.pad(prefill_attention(new_query, *pages, batch, seen, 0.5))
        for sequence in range(2):
            for token in range(before[sequence], ends[sequence]):
                upto = [token + 1, single.ends[1]] if sequence == 0 else [single.ends[0], token + 1]
                one, seen_alone = single.feed(*upto)
                layer = single.cache
                pages = layer.key_pages, layer.value_pages, layer.block_tables, layer.lengths
                alone = query[sequence, token : token + 1]
                alone = paged_attention(alone, *pages, 0.5, rows=one.row_index, recent=seen_alone.recent)
                got = out[sequence, token - before[sequence]]
                torch.testing.assert_close(got, alone[0], rtol=0, atol=TOLERANCE)


def test_backends_are_found_by_name() -> None:
    assert load_backend("reference") is reference
    assert load_backend("auto").__name__.startswith("dmc.kernels.")
    with pytest.raises(ValueError, match="kernels='cuda-magic' is unknown: expected 'auto' or one of reference"):
        load_backend("cuda-magic")
