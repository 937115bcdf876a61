"""Pages of 8 bits: what rounding costs, and that every backend writes and reads them alike, and no wider copy."""

import warnings

import pytest
import torch
from oracles.backends import backends_here
from oracles.cache_layers import Stream, assert_same_state, copy_to, make_layer

from dmc.compression import CompressionConfig
from dmc.kernels import cpu, load_backend, reference
from dmc.kernels.layout import CacheLayout
from dmc.kernels.pages import gather_pages, quantize

HEAD_DIM, GROUP, SCALING = 32, 3, 0.2
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=backends_here(HEAD_DIM))
def backend(request):
    return load_backend(request.param)


def attend(backend, layer, query, **options):
    pages = layer.key_pages, layer.value_pages, layer.block_tables
    return backend.paged_attention(query, *pages, layer.lengths, SCALING, scales=layer.scales, **options)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_a_number_is_off_by_half_a_step_of_its_row_at_most(size):
    states = size * torch.randn(50, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    states[0], states[1, 3], states[2] = 0, states[1].abs().max() * 3, states[2].bfloat16().float()
    rounded, scales = quantize(states)
    torch.testing.assert_close(scales[:, 0], states.abs().amax(-1) / 127)
    assert ((rounded * scales - states).abs() <= scales * 0.5001).all() and not rounded[0].any()
    again, same = quantize(rounded * scales)
    assert torch.equal(again, rounded)
    torch.testing.assert_close(same, scales)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_number_that_is_none_stays_one(backend, broken):
    layer = make_layer(None, head_dim=HEAD_DIM, in_8_bits=True)
    batch, tokens = Stream(layer, None, rows=[1], time=3).tokens(0, 3)
    tokens.key[1, 0, 5] = tokens.value[2, 1, 7] = broken
    backend.append_or_merge(layer, batch, tokens, None)
    key, value = (
        gather_pages(pages, layer.block_tables[1:2], 3, scales)[0].isfinite().all(-1)
        for pages, scales in zip((layer.key_pages, layer.value_pages), layer.scales or ())
    )
    assert key.tolist() == [[True, False, True], [True] * 3] and value.tolist() == [[True] * 3, [True, True, False]]


@pytest.mark.parametrize("large", [1.0, 30.0])
def test_the_error_of_attention_is_bounded_by_the_steps_of_keys_and_values(backend, large):
    exact = make_layer(None, head_dim=HEAD_DIM, max_blocks=4, num_rows=2)
    rounded = make_layer(None, head_dim=HEAD_DIM, max_blocks=4, num_rows=2, in_8_bits=True)
    batch, tokens = Stream(exact, None, rows=[1, 0], time=60).tokens(0, [60, 37])
    tokens.key[:, :, 3] *= large  # one channel far above the others, as keys have it
    for layer in (exact, rounded):
        backend.append_or_merge(layer, batch, tokens, None)
    query = torch.randn(2, 2 * GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    got, wanted = attend(backend, rounded, query), attend(backend, exact, query)
    for row in range(2):
        for member in range(2 * GROUP):
            head, length = member // GROUP, int(exact.lengths[row, member // GROUP])
            table = exact.block_tables[row, head].long()
            key, value = (
                pages[table].flatten(0, 1)[:length].double() for pages in (exact.key_pages, exact.value_pages)
            )
            key_step, value_step = key.abs().amax(-1) / 127, value.abs().amax(-1) / 127
            shift = (SCALING * query[row, member].double().abs().sum() * key_step / 2).max()  # of a score, at most
            share = (SCALING * key @ query[row, member].double()).softmax(0)
            change = torch.expm1(2 * shift) * share @ value.abs() + value_step.max() / 2
            assert ((got - wanted)[row, member].double().abs() <= change + 1e-5).all()


GATES = [None, {"delay": 0}, {"delay": 4, "window_size": None}, {"action": "drop", "delay": 4}]


@pytest.mark.parametrize(
    ("gates", "dtype"), [*zip(GATES, [*TOLERANCE] * 2, strict=True), (GATES[1], torch.float32)], ids=str
)
def test_backends_write_and_read_alike(backend, gates, dtype):
    config = None if gates is None else CompressionConfig(**gates)
    layer = make_layer(config, head_dim=HEAD_DIM, max_blocks=4, dtype=dtype, in_8_bits=True)
    expected, stream = copy_to(layer, "cpu"), Stream(layer, config, rows=[2, 0], time=50)
    begins = [0, 0]
    for counts in ((3, 7), (1, 1), (20, 1), (0, 18), (1, 0), (1, 1)):
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        batch, tokens = stream.tokens(begins, ends)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no slower code serves
            seen = backend.append_or_merge(layer, batch, tokens, config)
        wanted = reference.append_or_merge(expected, batch, tokens, config)
        assert_same_state(layer, expected, TOLERANCE[dtype])
        if wanted.open_slot is not None and seen.open_slot is not None:
            exists, last = wanted.open_slot.exists, int(batch.last[0])
            torch.testing.assert_close(seen.open_slot.key[exists], wanted.open_slot.key[exists], rtol=0.02, atol=0.05)
            head, (row, *_) = 1, batch.rows  # what a prompt's last query sees of its slot is what decoding reads
            held = gather_pages(layer.key_pages, layer.block_tables[row][None], 50, layer.key_scales)[0, head]
            read = held[int(layer.lengths[row, head]) - 1].to(dtype)
            torch.testing.assert_close(seen.open_slot.key[last, head] * exists[last], read * exists[last])
        query = torch.randn(batch.num_tokens, 2 * GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        out, want = (
            kernels.prefill_attention(query, *pages, batch, seen, SCALING, layer.scales)
            for kernels in (backend, reference)
        )
        torch.testing.assert_close(out, want, rtol=0, atol=TOLERANCE[dtype])
        begins = ends
    options = {"rows": torch.tensor([2, 0]), "recent": seen.recent, "return_scores": True}
    query = query[[0, 0]] if len(batch.rows) == 1 else query
    for out, want in zip(attend(backend, layer, query, **options), attend(reference, layer, query, **options)):
        torch.testing.assert_close(out, want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_received_attention_and_evictions_are_those_of_the_reference(backend, dtype):
    layer = make_layer(None, head_dim=HEAD_DIM, max_blocks=5, dtype=dtype, in_8_bits=True)
    batch, tokens = Stream(layer, None, rows=[2, 0], time=70).tokens(0, [70, 23])
    seen = backend.append_or_merge(layer, batch, tokens, None)
    query = torch.randn(93, 2 * GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    pages, sums = (layer.key_pages, layer.value_pages, layer.block_tables), []
    for kernels in (backend, reference):
        _, lse = kernels.prefill_attention(query, *pages, batch, seen, SCALING, layer.scales, return_lse=True)
        sums.append(kernels.attention_received(query, layer, batch, seen.slots, SCALING, lse))
    for got, wanted in zip(*sums):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    expected, rows = copy_to(layer, "cpu"), batch.row_index
    keep = torch.rand(2, 2, 70, generator=torch.Generator().manual_seed(4)) < 0.5
    for kernels, cache in ((backend, layer), (reference, expected)):
        kernels.compact(cache, rows, keep)
        kernels.evict(cache, rows, torch.tensor([[3, -1], [0, 2]]))
    assert_same_state(layer, expected, 0)


def test_compiled_code_takes_no_8_bit_pages_without_their_factors():
    layer = make_layer(None, head_dim=HEAD_DIM, in_8_bits=True)
    layer.key_scales = None
    batch, tokens = Stream(layer, None, rows=[0], time=1).tokens(0, 1)
    if cpu.load_library() is None:
        pytest.skip("no C++ compiler")
    with pytest.raises(ValueError, match="int8 pages without scales"):
        cpu.append_or_merge(layer, batch, tokens, None)


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.5), (torch.float32, 0.25)], ids=str)
def test_an_entry_takes_half_of_bfloat16_and_a_quarter_of_float32(dtype, share):
    layout = CacheLayout(2, 2, 128, dtype, torch.device("cpu"))
    full, small = (layout.stored_as(dtype).entry_bytes for dtype in ("auto", "int8"))
    assert small == 2 * (128 + 4) and small / full == pytest.approx(share, rel=0.04)
    assert layout.stored_as("int8").block_bytes(16) == 16 * small
