import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles.step_by_step import HeadOracle

from dmc.compression import CompressionConfig
from dmc.kernels import load_backend, reference
from dmc.kernels.reference import RawTokens, append_or_merge, gather_pages, paged_attention, write_slots

HEAD_DIM, THETA, BLOCK = 8, 100.0, 16
TOLERANCE = 1e-5


def random_pages(lengths: torch.Tensor, capacity: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Make pages full of noise and a table that scatters each head's blocks over them."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = lengths.numel() * capacity
    key, value = (torch.randn(num_blocks + 3, BLOCK, HEAD_DIM, generator=generator) for _ in range(2))
    tables = torch.randperm(num_blocks + 3, generator=generator)[:num_blocks].int().view(*lengths.shape, capacity)
    return key, value, tables


def naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
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
                scores.append(
                    float(query[row, head].double() @ key[block, slot % BLOCK].double()) / math.sqrt(HEAD_DIM)
                )
                values.append(value[block, slot % BLOCK].double())
            if scores:
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                out[row, head] = sum(weight * each for weight, each in zip(weights, values, strict=True))
    return out


@pytest.mark.parametrize("group", [1, 2, 4])
def test_paged_attention_equals_loops_over_slots_at_every_page_boundary(group: int) -> None:
    lengths = torch.tensor([[1, 0, 15], [16, 17, 31], [32, 33, 48]], dtype=torch.int32)
    key, value, tables = random_pages(lengths, capacity=3)
    query = torch.randn(3, 3 * group, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    out = paged_attention(query, key, value, tables, lengths, HEAD_DIM**-0.5)
    expected = naive_attention(query, key, value, tables, lengths)
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
    query, key, value = (each.to(dtype) for each in (query, key, value))
    out = paged_attention(query, key, value, tables, lengths, 0.5)
    expected = paged_attention(query.float(), key.float(), value.float(), tables, lengths, 0.5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)


def rotary_tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions.clamp_min(0)[..., None] * torch.cat((frequencies, frequencies))
    scale = torch.ones(HEAD_DIM)
    scale[-1] = 0
    return angles.cos() * scale, angles.sin() * scale


class Stream:
    """Random tokens of some sequences and heads, fed piece by piece as the runtime would, and their oracle."""

    def __init__(self, config: CompressionConfig, sequences: int = 2, heads: int = 3, time: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (sequences, heads, time)
        self.config, self.shape = config, shape
        self.key, self.value = (torch.randn(*shape, HEAD_DIM, generator=generator) for _ in range(2))
        self.key[..., -1] = 0
        self.merged = torch.rand(shape, generator=generator) < 0.6
        self.omega = torch.rand(shape, generator=generator) + 0.01
        window = config.window_size if config.action == "merge" else None
        self.history = config.delay + (window - 1 if window else 0)
        self.lengths = torch.zeros(shape[:2], dtype=torch.long)
        self.mean = torch.zeros(*shape[:2], 2 * HEAD_DIM) if config.window_size is None else None
        self.weight = torch.zeros(shape[:2]) if config.window_size is None else None
        capacity = -(-time // BLOCK)
        self.key_pages, self.value_pages, self.tables = random_pages(self.lengths, capacity, seed=5)

    def tokens(self, begin: int, end: int) -> RawTokens:
        """Return tokens begin..end-1 and the history before them; garbage where there is none."""
        first = begin - self.history
        positions = torch.arange(first, end).expand(self.shape[0], -1)

        def cut(states: torch.Tensor, garbage: Any) -> torch.Tensor:
            missing = max(0, -first)
            filler = torch.full((*states.shape[:2], missing, *states.shape[3:]), garbage, dtype=states.dtype)
            return torch.cat((filler, states[:, :, max(0, first) : end]), dim=2)

        return RawTokens(
            cut(self.key, 7.0),
            cut(self.value, -7.0),
            cut(self.merged, True),
            cut(self.omega, 9.0),
            positions,
            *rotary_tables(positions),
        )

    def feed(self, begin: int, end: int) -> None:
        update = append_or_merge(
            self.tokens(begin, end), end - begin, self.lengths, self.config, self.mean, self.weight
        )
        write_slots(self.key_pages, self.value_pages, self.tables, update)
        self.lengths, self.mean, self.weight = update.length[..., -1], update.mean, update.weight

    def oracle(self, sequence: int, head: int, end: int) -> list[tuple[np.ndarray, np.ndarray]]:
        oracle = HeadOracle(self.config, HEAD_DIM, THETA)
        for token in range(end - self.config.delay):
            oracle.enter(
                {
                    "key": self.key[sequence, head, token].double().numpy(),
                    "value": self.value[sequence, head, token].double().numpy(),
                    "omega": float(self.omega[sequence, head, token]),
                    "decision": bool(self.merged[sequence, head, token]) and token > 0,
                    "position": token,
                }
            )
        return oracle.slots

    def check(self, end: int) -> None:
        longest = max(1, int(self.lengths.max()))
        keys = gather_pages(self.key_pages, self.tables, longest)
        values = gather_pages(self.value_pages, self.tables, longest)
        for sequence in range(self.shape[0]):
            for head in range(self.shape[1]):
                slots = self.oracle(sequence, head, end)
                assert int(self.lengths[sequence, head]) == len(slots)
                for slot, (key, value) in enumerate(slots):
                    place = (sequence, head, slot)
                    torch.testing.assert_close(keys[place].double(), torch.from_numpy(key), rtol=0, atol=TOLERANCE)
                    torch.testing.assert_close(values[place].double(), torch.from_numpy(value), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pieces", [[40], [1] * 40, [3, 1, 1, 17, 2, 16]], ids=["whole", "one by one", "uneven"])
@pytest.mark.parametrize(
    "gates",
    [{"window_size": window, "delay": delay} for window in (1, 3, 12, None) for delay in (0, 1, 4, 16)]
    + [{"action": "drop", "delay": delay} for delay in (1, 4, 16)],
    ids=str,
)
def test_pages_hold_what_the_oracle_holds_after_every_piece(gates: dict, pieces: list[int]) -> None:
    stream, begin = Stream(CompressionConfig(**gates)), 0
    for count in pieces:
        stream.feed(begin, begin + count)
        begin += count
        if begin == 40 or begin % 7 == 0 or count > 1:
            stream.check(begin)
    assert begin == 40


def test_backends_are_found_by_name() -> None:
    assert load_backend("reference") is reference
    assert load_backend("auto").__name__.startswith("dmc.kernels.")
    with pytest.raises(ValueError, match="kernels='cuda-magic' is unknown: expected 'auto' or one of reference"):
        load_backend("cuda-magic")
