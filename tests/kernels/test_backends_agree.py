"""Every backend that runs here against the reference, over one matrix of shapes, dtypes, gates and page sizes."""

import copy
from types import ModuleType

import pytest
import torch
from covering import cover
from oracles.backends import backends_here
from oracles.cache_layers import Stream, fill, make_layer
from torch import Tensor

from dmc.compression import CompressionConfig
from dmc.kernels import load_backend, reference
from dmc.kernels.base import LayerCache, OpenSlotState, Recent, VisibleKeys
from dmc.kernels.batch import ForwardBatch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of outputs about 1 large: one rounding of the result to the dtype."""
HEAD_DIM = 32


@pytest.fixture(params=backends_here(HEAD_DIM)[1:])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return load_backend(request.param)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_pages(
    heads: tuple[int, int], capacity: int, block: int, dtype: torch.dtype, head_dim: int = HEAD_DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """Make pages of noise and tables that scatter each head's blocks over them."""
    num_blocks = heads[0] * heads[1] * capacity + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))[:-3]
    key, value = (noise(num_blocks, block, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    return key, value, order.int().view(*heads, capacity)


def ragged_lengths(block: int) -> Tensor:
    return torch.tensor([[0, 1], [block - 1, block], [block + 1, 2 * block + 3]], dtype=torch.int32)


def assert_agree(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("block", "group", "dtype"), cover((16, 32, 64, 128), (1, 2, 4, 8), (torch.float32, torch.bfloat16)), ids=str
)
def test_paged_attention_agrees_for_ragged_heads(
    backend: ModuleType, block: int, group: int, dtype: torch.dtype
) -> None:
    pages = random_pages((3, 2), 3, block, dtype)
    query, lengths = noise(3, 2 * group, HEAD_DIM, seed=3, dtype=dtype), ragged_lengths(block)
    out = backend.paged_attention(query, *pages, lengths, HEAD_DIM**-0.5)
    assert_agree(out, reference.paged_attention(query, *pages, lengths, HEAD_DIM**-0.5), dtype)
    assert not out[0, :group].any()


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 256])
def test_paged_attention_agrees_for_every_head_size(backend: ModuleType, head_dim: int) -> None:
    if backend.supports(torch.float32, head_dim, 16, torch.device("cpu")) is not None:
        pytest.skip("not supported")
    pages = random_pages((3, 2), 3, 16, torch.float32, head_dim)
    query, lengths = noise(3, 6, head_dim, seed=3), ragged_lengths(16)
    out = backend.paged_attention(query, *pages, lengths, head_dim**-0.5)
    assert_agree(out, reference.paged_attention(query, *pages, lengths, head_dim**-0.5), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recents", [0, 1, 4, 16])
def test_paged_attention_agrees_with_permuted_rows_recent_tokens_and_scores(
    backend: ModuleType, recents: int, dtype: torch.dtype
) -> None:
    pages = random_pages((3, 2), 3, 16, dtype)
    query = noise(2, 4, HEAD_DIM, seed=3, dtype=dtype)
    key, value = (noise(2 * recents, 2, HEAD_DIM, seed=seed, dtype=dtype) for seed in (4, 5))
    exists = (torch.arange(recents) >= torch.tensor([[recents // 2], [0]])).flatten()
    options = {
        "rows": torch.tensor([2, 0]),
        "recent": Recent(key, value, exists) if recents else None,
        "return_scores": True,
    }
    out, scores = backend.paged_attention(query, *pages, ragged_lengths(16), 0.3, **options)
    expected, expected_scores = reference.paged_attention(query, *pages, ragged_lengths(16), 0.3, **options)
    assert_agree(out, expected, dtype)
    assert_agree(scores, expected_scores, torch.float32)
    longest = int(ragged_lengths(16)[[2, 0]].max())
    narrow_out, narrow = backend.paged_attention(query, *pages, ragged_lengths(16), 0.3, **options, num_scores=longest)
    assert torch.equal(narrow_out, out) and torch.equal(narrow, scores[..., :longest].contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_of_slots_agrees(backend: ModuleType, dtype: torch.dtype) -> None:
    key, value, tables = random_pages((3, 2), 3, 16, dtype)
    bias, query = 3 * noise(*key.shape[:2], seed=9), noise(3, 4, HEAD_DIM, seed=3, dtype=dtype)
    raw = (noise(12, 2, HEAD_DIM, seed=seed, dtype=dtype) for seed in (4, 5))
    options = {"recent": Recent(*raw, torch.arange(12) > 1), "bias": bias, "return_scores": True, "num_scores": 48}
    out, scores = backend.paged_attention(query, key, value, tables, ragged_lengths(16), 0.3, **options)
    wanted, probabilities = reference.paged_attention(query, key, value, tables, ragged_lengths(16), 0.3, **options)
    assert_agree(out, wanted, dtype)
    assert_agree(scores, probabilities, torch.float32)
    batch, slots = ForwardBatch([2, 1], [0, 0], [5, 20]), torch.arange(25)[:, None].expand(-1, 2).int()
    given = noise(25, 4, HEAD_DIM, seed=3, dtype=dtype), key, value, tables, batch, VisibleKeys(slots), 0.3
    assert_agree(backend.prefill_attention(*given, bias=bias), reference.prefill_attention(*given, bias=bias), dtype)


def test_long_heads_agree_when_threads_share_them(backend: ModuleType) -> None:
    pages = random_pages((1, 2), 40, 64, torch.float32)
    query, lengths = noise(1, 4, HEAD_DIM, seed=3), torch.tensor([[2560, 700]], dtype=torch.int32)
    expected, expected_scores = reference.paged_attention(query, *pages, lengths, 0.3, return_scores=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        out, scores = backend.paged_attention(query, *pages, lengths, 0.3, return_scores=True)
    finally:
        torch.set_num_threads(threads)
    assert_agree(out, expected, torch.float32)
    assert_agree(scores, expected_scores, torch.float32)


@pytest.mark.parametrize(
    ("with_top", "num_new", "group", "delay", "dtype"),
    cover(
        (False, True),
        ((1, 1), (5, 1), (3, 70), (70, 70)),
        (1, 2, 8),
        (0, 1, 16),
        (torch.float32, torch.bfloat16),
    ),
    ids=str,
)
def test_prefill_attention_agrees(
    backend: ModuleType, with_top: bool, num_new: tuple[int, int], group: int, delay: int, dtype: torch.dtype
) -> None:
    pages, batch = random_pages((3, 2), 8, 16, dtype), ForwardBatch([2, 1], [0, 0], list(num_new))
    generator, count = torch.Generator().manual_seed(6), sum(num_new)
    slots = torch.randint(0, 8 * 16 + 1, (count, 2), generator=generator)
    slots = torch.cat([part.sort(0).values for part in slots.split(list(num_new))]).int()
    slots[0, 0] = 0
    seen, place = VisibleKeys(slots), batch.positions
    if with_top:
        key, value = (noise(count, 2, HEAD_DIM, seed=seed, dtype=dtype) for seed in (4, 5))
        seen.open_slot = OpenSlotState(key, value, place >= torch.tensor([num_new[0] // 2, 0])[batch.sequence])
    if delay:
        wide = batch.extended(delay - 1)
        key, value = (noise(wide.num_tokens, 2, HEAD_DIM, seed=seed, dtype=dtype) for seed in (7, 8))
        seen.recent = Recent(key, value, wide.positions >= torch.tensor([1 - delay, 0])[wide.sequence])
    query = noise(count, 2 * group, HEAD_DIM, seed=3, dtype=dtype)
    out, lse = backend.prefill_attention(query, *pages, batch, seen, 0.3, return_lse=True)
    wanted, sums = reference.prefill_attention(query, *pages, batch, seen, 0.3, return_lse=True)
    assert_agree(out, wanted, dtype)
    assert_agree(lse.where(sums > -torch.inf, 0), sums.where(sums > -torch.inf, 0), dtype)
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(backend.prefill_attention(by_head, *pages, batch, seen, 0.3), out)


def test_noncontiguous_queries_agree(backend: ModuleType) -> None:
    pages = random_pages((2, 2), 2, 16, torch.float32)
    lengths = torch.tensor([[20, 3], [32, 16]], dtype=torch.int32)
    expected = reference.paged_attention(noise(2, 4, HEAD_DIM, seed=3), *pages, lengths, 0.3)
    by_head = noise(2, 4, HEAD_DIM, seed=3).transpose(0, 1).contiguous().transpose(0, 1)
    by_channel = noise(2, 4, HEAD_DIM, seed=3).transpose(1, 2).contiguous().transpose(1, 2)
    for query in (by_head, by_channel):
        assert_agree(backend.paged_attention(query, *pages, lengths, 0.3), expected, torch.float32)


def test_what_lies_beyond_the_length_is_never_read(backend: ModuleType) -> None:
    key, value, tables = random_pages((1, 2), 2, 16, torch.float32)
    lengths = torch.tensor([[5, 20]], dtype=torch.int32)
    expected = reference.paged_attention(noise(1, 4, HEAD_DIM, seed=3), key, value, tables, lengths, 0.3)
    for pages in (key, value):
        pages[tables[0, 0, 0], 5:] = torch.nan
        pages[tables[0, 1, 1], 4:] = torch.nan
    tables[0, 0, 1] = 1 << 30
    out = backend.paged_attention(noise(1, 4, HEAD_DIM, seed=3), key, value, tables, lengths, 0.3)
    assert_agree(out, expected, torch.float32)


def test_scores_far_apart_neither_overflow_nor_vanish(backend: ModuleType) -> None:
    pages = random_pages((3, 2), 3, 16, torch.float32)
    query = 1e3 * noise(3, 4, HEAD_DIM, seed=3)
    out = backend.paged_attention(query, *pages, ragged_lengths(16), 1.0)
    # Scores of some thousands carry float32 errors of about 1e-3 each.
    expected = reference.paged_attention(query, *pages, ragged_lengths(16), 1.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-2)


ROWS, HEADS, TIME = 3, 2, 37
DROP = [{"action": "drop", "delay": delay} for delay in (1, 4, 16)]


def small_layer(config: CompressionConfig | None, dtype: torch.dtype, block: int) -> LayerCache:
    return make_layer(
        config,
        num_rows=ROWS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        block_size=block,
        max_blocks=-(-TIME // block),
        dtype=dtype,
    )


def assert_same_state(layer: LayerCache, expected: LayerCache, dtype: torch.dtype) -> None:
    for name in ("free_blocks", "num_free", "lengths", "history_key", "history_value", "history_decisions"):
        assert torch.equal(getattr(layer, name), getattr(expected, name)), name
    assert torch.equal(layer.history_omega, expected.history_omega)
    owned = torch.arange(layer.block_tables.shape[-1]) < -(-layer.lengths[..., None] // layer.block_size)
    assert torch.equal(layer.block_tables[owned], expected.block_tables[owned])
    capacity = layer.block_tables.shape[-1] * layer.block_size
    held = torch.arange(capacity) < layer.lengths[..., None]
    for name in ("key_pages", "value_pages"):
        got, wanted = (
            reference.gather_pages(getattr(cache, name), cache.block_tables, capacity)[held]
            for cache in (layer, expected)
        )
        assert_agree(got, wanted, dtype)
    for name in ("mean", "weight"):
        if getattr(expected, name) is not None:
            torch.testing.assert_close(getattr(layer, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


def assert_same_seen(seen: VisibleKeys, expected: VisibleKeys, dtype: torch.dtype) -> None:
    assert torch.equal(seen.slots.long(), expected.slots.long())
    assert (seen.open_slot is None) == (expected.open_slot is None) and (seen.recent is None) == (
        expected.recent is None
    )
    if seen.recent is not None and expected.recent is not None:
        assert torch.equal(seen.recent.exists, expected.recent.exists)
        exists = expected.recent.exists
        assert_agree(seen.recent.key[exists], expected.recent.key[exists], dtype)
        assert torch.equal(seen.recent.value[exists], expected.recent.value[exists])


@pytest.mark.parametrize(
    ("gates", "dtype", "block"),
    [
        *((settings, dtype, 16) for settings, dtype in ((None, torch.bfloat16), (DROP[0], torch.float32))),
        *((settings, dtype, 32) for settings, dtype in ((DROP[1], torch.bfloat16), (DROP[2], torch.float32))),
        *(
            ({"window_size": window, "delay": delay}, dtype, block)
            for window, delay, dtype, block in cover(
                (None, 1, 3, 12), (0, 1, 4, 16), (torch.float32, torch.bfloat16), (16, 32)
            )
        ),
    ],
    ids=str,
)
def test_single_tokens_leave_the_same_state(
    backend: ModuleType, gates: dict | None, dtype: torch.dtype, block: int
) -> None:
    config = None if gates is None else CompressionConfig(**gates)
    layer = small_layer(config, dtype, block)
    expected, stream = copy.deepcopy(layer), Stream(layer, config, rows=[2, 0], time=TIME)
    for step in range(TIME):  # the second sequence is five tokens behind the first
        batch, tokens = stream.tokens([step, max(step - 5, 0)], [step + 1, max(step - 4, 0)])
        seen = backend.append_or_merge(layer, batch, tokens, config)
        assert_same_seen(seen, reference.append_or_merge(expected, batch, tokens, config), dtype)
        assert_same_state(layer, expected, dtype)
    assert layer.lengths[2].min() > 1 and not layer.lengths[1].any()


@pytest.mark.parametrize(
    "gates", [None, {"delay": 0}, {"delay": 4, "window_size": None}, {"action": "drop", "delay": 4}], ids=str
)
def test_ragged_pieces_between_single_tokens_leave_the_same_state(backend: ModuleType, gates: dict | None) -> None:
    config = None if gates is None else CompressionConfig(**gates)
    layer = small_layer(config, torch.float32, 16)
    expected, stream = copy.deepcopy(layer), Stream(layer, config, rows=[2, 0], time=TIME)
    begins = [0, 0]
    for counts in ((3, 7), (1, 1), (20, 1), (0, 18), (1, 0), (1, 3)):
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        batch, tokens = stream.tokens(begins, ends)
        seen = backend.append_or_merge(layer, batch, tokens, config)
        wanted = reference.append_or_merge(expected, batch, tokens, config)
        assert_same_seen(seen, wanted, torch.float32)
        assert_same_state(layer, expected, torch.float32)
        query = noise(batch.num_tokens, 2 * HEADS, HEAD_DIM, seed=sum(begins))
        pages = [(cache.key_pages, cache.value_pages, cache.block_tables) for cache in (layer, expected)]
        out = backend.prefill_attention(query, *pages[0], batch, seen, 0.3)
        assert_agree(out, reference.prefill_attention(query, *pages[1], batch, wanted, 0.3), torch.float32)
        begins = ends


@pytest.mark.parametrize(
    ("counts", "group", "dtype"),
    cover(((1, 1), (16, 3), (90, 127), (200, 200)), (1, 3), (torch.float32, torch.bfloat16)),
    ids=str,
)
def test_slots_receive_the_column_sums_of_the_attention_matrix(
    counts: tuple[int, int], group: int, dtype: torch.dtype
) -> None:
    lengths = [count + 37 if count in (90, 127) else count for count in counts]  # of heads, after these tokens
    layer = fill(
        make_layer(None, head_dim=HEAD_DIM, max_blocks=14, dtype=dtype),
        torch.tensor([[lengths[1], 0], [0, 0], [lengths[0], lengths[0] + 9]]),
    )
    layer.lengths[2, 1] -= 9  # beyond the end lies garbage
    layer.lengths[0, 1] = layer.lengths[0, 0]
    layer.block_tables[0, 1] = layer.block_tables[0, 0]
    batch = ForwardBatch([2, 0], [length - count for length, count in zip(lengths, counts, strict=True)], list(counts))
    query = noise(sum(counts), 2 * group, HEAD_DIM, seed=3, dtype=dtype)
    slots = (1 + batch.positions)[:, None].repeat(1, 2).int()
    slots[: counts[0], 1] = (slots[: counts[0], 1] - 30).clamp_min(1)  # a head of fewer slots
    wanted = torch.zeros(2, 2, group, max(lengths)).double()
    squares = wanted[:, :, 0].clone()
    for sequence, (row, span) in enumerate(zip(batch.rows, batch.spans, strict=True)):
        for head in range(2):
            table, length = layer.block_tables[row, head].long(), lengths[sequence]
            key = layer.key_pages[table].flatten(0, 1)[:length].double()
            head_query = query[span, head * group : (head + 1) * group].double().transpose(0, 1)
            seen = torch.arange(length) < slots[span, head][:, None]
            weights = (0.3 * head_query @ key.T).masked_fill(~seen, -torch.inf).softmax(-1)
            wanted[sequence, head, :, :length] = weights.sum(1)
            squares[sequence, head, :length] = weights.mean(0).square().sum(0)
    for name in backends_here(HEAD_DIM):
        if load_backend(name).supports(dtype, HEAD_DIM, 16, torch.device("cpu")) is None:
            pages, seen = (layer.key_pages, layer.value_pages, layer.block_tables), VisibleKeys(slots)
            _, lse = load_backend(name).prefill_attention(query, *pages, batch, seen, 0.3, return_lse=True)
            got = load_backend(name).attention_received(query, layer, batch, slots, 0.3, lse)
            torch.testing.assert_close(got[0].double(), wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[1].double(), squares, rtol=1e-5, atol=1e-5)
