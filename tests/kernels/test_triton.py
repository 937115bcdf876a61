"""The Triton kernels against the reference: in float32 by Triton's interpreter on a CPU, in 16 bit too on a GPU.

The interpreter has to be chosen before triton is imported: `test_interpreter.py` starts a process with those tests.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import cover
from oracles.cache_layers import Stream, assert_same_state, assert_same_view, copy_to, fill, make_layer

from dmc import Engine, SamplingParams
from dmc.compression import CompressionConfig
from dmc.kernels import reference
from dmc.kernels.base import LayerCache, Recent, VisibleKeys

pytest.importorskip("triton", reason="triton is not installed")
from dmc.kernels import triton as kernels
from dmc.kernels.triton import append, decode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PLACES = (
    [pytest.param(("cpu", torch.float32), id="interpreter")]
    if INTERPRETED
    else [pytest.param(("cuda", dtype), marks=pytest.mark.gpu, id=f"cuda-{dtype}") for dtype in TOLERANCES]
)
GATES = [
    None,
    *({"window_size": window, "delay": delay} for window in (None, 1, 12) for delay in (0, 4)),
    {"action": "drop", "delay": 4},
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Device and dtype of a run."""
    return request.param


def gates_of(settings: dict | None) -> CompressionConfig | None:
    return None if settings is None else CompressionConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        *({"window_size": 12, "delay": 0}, {"window_size": None, "delay": 4}, {"action": "drop", "delay": 4}),
        *(pytest.param(GATES[index], marks=pytest.mark.slow) for index in (0, 1, 3, 4, 6)),
    ],
    ids=str,
)
def test_a_stream_leaves_the_state_of_the_reference(
    settings: dict | None, place: tuple[str, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype = place
    monkeypatch.setattr(append, "CHUNK", 8)
    config, tolerance = gates_of(settings), TOLERANCES[dtype]
    expected = make_layer(config, block_size=4, max_blocks=16, head_dim=24, dtype=dtype)
    actual = copy_to(expected, device)
    stream = Stream(expected, config, rows=[2, 0], time=62)
    ones = (([token, token + 35], [token + 1, token + 36]) for token in range(17, 23))
    for begin, end in ((0, 1), (1, 2), (2, 17), (17, [17, 52]), *ones, ([23, 58], [57, 61])):
        batch, tokens = stream.tokens(begin, end)
        seen = kernels.append_or_merge(actual, copy_to(batch, device), copy_to(tokens, device), config)
        wanted = reference.append_or_merge(expected, batch, tokens, config)
        assert_same_view(seen, wanted, tolerance)
        assert_same_state(actual, expected, tolerance)
        if seen.chunk_ends is not None:
            chunks = -(-expected.lengths[batch.rows].flatten() // 8)
            assert torch.equal(seen.chunk_ends.cpu(), chunks.clamp_min(1).cumsum(0).int())
    assert not expected.lengths[1].any()


@pytest.mark.parametrize(
    ("broken", "settings"), [("key", {}), ("value", {"delay": 4}), ("omega", {"window_size": None})], ids=str
)
def test_a_number_that_is_not_finite_reaches_its_own_slot_alone(
    broken: str, settings: dict, place: tuple[str, torch.dtype]
) -> None:
    device, dtype = place
    config = gates_of(settings)
    expected = make_layer(config, block_size=4, max_blocks=14, dtype=dtype)
    actual = copy_to(expected, device)
    stream = Stream(expected, config, rows=[0], time=40)
    getattr(stream, broken)[0, 9] = torch.inf
    batch, tokens = stream.tokens(0, 40)
    kernels.append_or_merge(actual, copy_to(batch, device), copy_to(tokens, device), config)
    reference.append_or_merge(expected, batch, tokens, config)
    for got, wanted in zip(actual.entry_pages, expected.entry_pages):
        assert 0 < wanted.isnan().sum() < wanted.numel() / 10
        torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=TOLERANCES[dtype], equal_nan=True)


@pytest.mark.parametrize("settings", [{"delay": 4}, {"window_size": None}], ids=str)
def test_pages_of_8_bits_are_written_read_and_moved_as_by_the_reference(
    settings: dict | None, place: tuple[str, torch.dtype]
) -> None:
    device, dtype = place
    config, tolerance, generator = gates_of(settings), TOLERANCES[dtype], torch.Generator().manual_seed(0)
    expected = make_layer(config, block_size=16, max_blocks=4, head_dim=24, dtype=dtype, in_8_bits=True)
    actual = copy_to(expected, device)
    stream = Stream(expected, config, rows=[2, 0], time=22)
    for begin, end in ((0, 20), (20, 21), (21, 22)):
        batch, tokens = stream.tokens(begin, end)
        seen = kernels.append_or_merge(actual, copy_to(batch, device), copy_to(tokens, device), config)
        wanted = reference.append_or_merge(expected, batch, tokens, config)
        assert_same_view(seen, wanted, tolerance)
        assert_same_state(actual, expected, tolerance)
        query = torch.randn(batch.num_tokens, 6, 24, generator=generator).to(dtype)
        tensors = query, expected.key_pages, expected.value_pages, expected.block_tables, batch, wanted
        want = reference.prefill_attention(*tensors, 0.2, expected.scales)
        scales = tuple(scale.to(device) for scale in expected.scales or ())
        got = kernels.prefill_attention(*(copy_to(tensor, device) for tensor in tensors), 0.2, scales)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=tolerance)
    pages = expected.key_pages, expected.value_pages, expected.block_tables, expected.lengths
    options = {"rows": batch.row_index, "recent": wanted.recent, "return_scores": True}
    keywords = {name: copy_to(value, device) for name, value in options.items()}
    got = kernels.paged_attention(
        query.to(device), *(tensor.to(device) for tensor in pages), 0.2, scales=scales, **keywords
    )
    for actual, want in zip(got, reference.paged_attention(query, *pages, 0.2, scales=expected.scales, **options)):
        torch.testing.assert_close(actual.cpu(), want, rtol=0, atol=tolerance)
    actual, keep = copy_to(expected, device), torch.rand(2, 2, 22, generator=generator) < 0.5
    for implementation, layer, where in ((kernels, actual, device), (reference, expected, "cpu")):
        implementation.compact(layer, batch.row_index.to(where), keep.to(where))
        implementation.evict(layer, batch.row_index.to(where), torch.tensor([[1, -1], [0, 1]], device=where))
    assert_same_state(actual, expected, 0)


def decode_case(
    place: tuple[str, torch.dtype], lengths: list[list[int]], *, group: int, head_dim: int, delay: int, block_size: int
) -> tuple[list[torch.Tensor], Recent | None]:
    """Make (query, pages, tables, lengths) and recent tokens, some of which do not exist."""
    device, dtype = place
    generator = torch.Generator().manual_seed(0)
    rows, kv_heads = len(lengths), len(lengths[0])
    capacity = max(1, -(-max(map(max, lengths)) // block_size))
    layer = make_layer(
        None,
        num_rows=rows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        max_blocks=capacity,
        dtype=dtype,
    )
    layer = copy_to(fill(layer, torch.tensor(lengths)), device)
    query = torch.randn(rows, kv_heads * group, head_dim, generator=generator).to(device, dtype)
    recent = None
    if delay:
        key, value = torch.randn(2, rows * delay, kv_heads, head_dim, generator=generator).to(device, dtype).unbind()
        recent = Recent(key, value, (torch.rand(rows * delay, generator=generator) < 0.5).to(device))
    return [query, layer.key_pages, layer.value_pages, layer.block_tables, layer.lengths], recent


@pytest.mark.parametrize(
    ("sizes", "delay", "return_scores"), cover(((1, 16, 16), (4, 24, 32), (3, 64, 128)), (0, 4), (False, True)), ids=str
)
def test_decode_equals_the_reference_at_every_page_boundary(
    place: tuple[str, torch.dtype], sizes: tuple[int, int, int], delay: int, return_scores: bool
) -> None:
    group, head_dim, block_size = sizes
    lengths = [[0, 1], [block_size - 1, block_size], [block_size + 1, 2 * block_size]]
    tensors, recent = decode_case(place, lengths, group=group, head_dim=head_dim, delay=delay, block_size=block_size)
    options = {"recent": recent, "return_scores": return_scores}
    actual = kernels.paged_attention(*tensors, 0.2, **options)
    torch.testing.assert_close(
        actual, reference.paged_attention(*tensors, 0.2, **options), rtol=0, atol=TOLERANCES[place[1]]
    )


def test_decode_reads_the_rows_it_is_given(place: tuple[str, torch.dtype]) -> None:
    tensors, _ = decode_case(place, [[3, 1], [18, 9], [7, 0]], group=2, head_dim=16, delay=0, block_size=16)
    query, *cache = tensors
    rows = torch.tensor([2, 0], device=place[0])
    wide = torch.stack((query, query), dim=2)[:2, :, 0]  # strides that are not those of a dense query
    for query_view in (wide, query[:2].transpose(0, 1).contiguous().transpose(0, 1)):
        actual = kernels.paged_attention(query_view, *cache, 0.2, rows=rows, return_scores=True)
        wanted = reference.paged_attention(query_view, *cache, 0.2, rows=rows, return_scores=True)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCES[place[1]])


def runs_of(lengths: list[int], num_programs: int) -> list[list[int]]:
    """Deal the queue of the heads' chunks out; give the head of each chunk of each program's run."""
    queue = [head for head, length in enumerate(lengths) for _ in range(max(1, -(-length // decode.CHUNK)))]
    busy = min(num_programs, len(queue))
    return [queue[i * len(queue) // busy : (i + 1) * len(queue) // busy] for i in range(busy)]


@pytest.mark.parametrize(("num_programs", "delay"), [(1, 0), (5, 3), (16, 3)])
def test_decode_deals_heads_of_very_different_lengths_out_in_equal_runs(
    place: tuple[str, torch.dtype], num_programs: int, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty heads, lengths at the edges of chunks, random ones, and one head a hundred times as long as most."""
    monkeypatch.setattr(decode, "_multiprocessors", lambda _: num_programs)
    monkeypatch.setattr(decode, "tuning_of", lambda _: decode.Tuning(programs=1))
    monkeypatch.setattr(decode, "COUNTED_TOGETHER", 8)  # not all heads at once
    monkeypatch.setattr(decode, "WAYS", 4)
    merge, cuts = decode._merge_kernel, []

    class Spy:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *given, **constants: (cuts.extend(given[2].tolist()), merge[grid](*given, **constants))

    monkeypatch.setattr(decode, "_merge_kernel", Spy())
    generator = torch.Generator().manual_seed(num_programs)
    edges = [0, 1, 127, 128, 129, 256, 0, 1300, 13]
    lengths = [*edges, *torch.randint(0, 40, (9,), generator=generator).tolist()]
    tensors, recent = decode_case(
        place, [lengths[i : i + 2] for i in range(0, 18, 2)], group=3, head_dim=16, delay=delay, block_size=16
    )
    sinks = torch.randn(6, generator=generator).to(*place) if num_programs == 5 else None
    bias = None if sinks is None else torch.randn(tensors[1].shape[:2], generator=generator).to(place[0])
    options = {"recent": recent, "return_scores": True, "num_scores": 1301, "sinks": sinks, "bias": bias}
    actual = kernels.paged_attention(*tensors, 0.2, **options)
    wanted = reference.paged_attention(*tensors, 0.2, **options)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCES[place[1]])
    runs = runs_of(lengths, num_programs)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    for i, (run, (head, num_parts)) in enumerate(zip(runs, cuts, strict=True)):
        begins_here = run[-1] not in (head for before in runs[:i] for head in before)
        parts = sum(run[-1] in other for other in runs) if begins_here else 1
        assert (head, num_parts) == (run[-1], parts if parts > 1 else 0)


def test_decode_never_reads_beyond_the_length(place: tuple[str, torch.dtype]) -> None:
    tensors, _ = decode_case(place, [[5, 20]], group=1, head_dim=16, delay=0, block_size=16)
    expected = kernels.paged_attention(*tensors, 0.2)
    _, key_pages, value_pages, tables, _ = tensors
    for pages in (key_pages, value_pages):
        pages[tables[0, 0, 0].long(), 5:] = torch.nan
        pages[tables[0, 1, 1].long(), 4:] = torch.nan
    torch.testing.assert_close(kernels.paged_attention(*tensors, 0.2), expected, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [None, {"delay": 0}, {"delay": 4}, {"action": "drop", "delay": 20}], ids=str)
def test_prefill_equals_the_reference_chunk_by_chunk(settings: dict | None, place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    config, generator = gates_of(settings), torch.Generator().manual_seed(0)
    layer = make_layer(config, block_size=16, max_blocks=10, head_dim=24, dtype=dtype)
    stream = Stream(layer, config, rows=[2, 0], time=60)
    for begins, ends in (([0, 0], [2, 7]), ([2, 7], [40, 8]), ([40, 8], [60, 43])):
        batch, tokens = stream.tokens(begins, ends)
        query = torch.randn(batch.num_tokens, 6, 24, generator=generator).to(dtype)
        seen = reference.append_or_merge(layer, batch, tokens, config)
        tensors = query, layer.key_pages, layer.value_pages, layer.block_tables, batch, seen
        sinks = None if config is None else torch.randn(6, generator=generator)
        bias = None if config is None else torch.randn(layer.key_pages.shape[:2], generator=generator)
        wanted = reference.prefill_attention(*tensors, 0.2, sinks=sinks, bias=bias)
        given = [copy_to(tensor, device) for tensor in tensors]
        options = {name: copy_to(tensor, device) for name, tensor in (("sinks", sinks), ("bias", bias))}
        actual = kernels.prefill_attention(*given, 0.2, **options)
        torch.testing.assert_close(actual.cpu(), wanted, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_slots_receive_the_attention_that_the_reference_sums(in_8_bits: bool, place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    generator = torch.Generator().manual_seed(0)
    layer = make_layer(None, max_blocks=3, head_dim=24, dtype=dtype, in_8_bits=in_8_bits)
    layer.sinks = torch.randn(6, generator=generator) if in_8_bits else None
    stream = Stream(layer, None, rows=[2, 0], time=40)
    for begins, ends in (([0, 0], [19, 9]), ([19, 9], [26, 40])):
        batch, tokens = stream.tokens(begins, ends)
        slots = reference.append_or_merge(layer, batch, tokens, None).slots
        slots[:, 1] = (slots[:, 1] - 7).clamp_min(1)  # a head of fewer slots
        query = torch.randn(batch.num_tokens, 6, 24, generator=generator).to(dtype)
        pages, seen = (layer.key_pages, layer.value_pages, layer.block_tables), VisibleKeys(slots)
        tensors = query, *pages, batch, seen, 0.2, layer.scales, True, layer.sinks
        _, sums = reference.prefill_attention(*tensors)
        wanted = reference.attention_received(query, layer, batch, slots, 0.2, sums)
        _, lse = kernels.prefill_attention(*(copy_to(tensor, device) for tensor in tensors))
        torch.testing.assert_close(lse.cpu(), sums, rtol=0, atol=TOLERANCES[dtype])
        given = (copy_to(each, device) for each in (query, layer, batch, slots))
        for got, each in zip(kernels.attention_received(*given, 0.2, lse), wanted, strict=True):
            count = each.shape[-1]
            torch.testing.assert_close(got[..., :count].cpu(), each, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
            assert not got[..., count:].any()


@pytest.mark.parametrize("place", PLACES[:1], indirect=True)
def test_the_engine_generates_the_tokens_of_the_reference(
    place: tuple[str, torch.dtype], make_compressed: Callable[..., Any], make_prompts: Callable[..., list[list[int]]]
) -> None:
    model, prompts = make_compressed(gates={"delay": 3}, num_layers=1).to(place[0]), make_prompts(3, 11)
    params = SamplingParams(max_new_tokens=3, temperature=0)
    expected = Engine(model, kernels="reference").generate(prompts, params)
    engine = Engine(model, kernels="triton", prefill_chunk_size=4)  # the longest prompt goes on while others decode
    assert [generation.token_ids for generation in engine.generate(prompts, params)] == [
        generation.token_ids for generation in expected
    ]
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("place", PLACES[:1], indirect=True)
def test_layers_with_a_window_generate_the_tokens_of_the_reference(
    place: tuple[str, torch.dtype], make_stock: Callable[..., Any], make_prompts: Callable[..., list[list[int]]]
) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    model, prompts = make_stock("ministral", **kinds).to(place[0]), make_prompts(18, 23)
    params = SamplingParams(max_new_tokens=3, temperature=0)
    expected = Engine(model, kernels="reference").generate(prompts, params)
    engine = Engine(model, kernels="triton", prefill_chunk_size=8)
    assert [each.token_ids for each in engine.generate(prompts, params)] == [each.token_ids for each in expected]
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95, 1.0])
def test_compaction_leaves_the_state_of_the_reference(share: float, place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    expected = fill(make_layer(None, max_blocks=5, dtype=dtype), torch.tensor([[0, 1], [15, 16], [17, 80]]))
    actual = copy_to(expected, device)
    keep = torch.rand(2, 2, 80, generator=torch.Generator().manual_seed(0)) < share
    rows = torch.tensor([2, 1])
    kernels.compact(actual, rows.to(device), keep.to(device))
    reference.compact(expected, rows, keep)
    assert_same_state(actual, expected, 0)


def test_what_the_kernels_cannot_serve_is_said(place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    assert kernels.supports(dtype, 64, 16, torch.device(device)) is None
    assert kernels.supports(torch.float64, 64, 16, torch.device(device)).startswith("dtype=torch.float64")
    assert kernels.supports(dtype, 512, 16, torch.device(device)).startswith("head_dim=512")
    if INTERPRETED:
        assert kernels.supports(torch.bfloat16, 64, 16, torch.device(device)).endswith("use float32")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_a_cpu_without_the_interpreter_is_not_supported() -> None:
    reason = kernels.supports(torch.float32, 64, 16, torch.device("cpu"))
    assert reason == "kernels.triton needs an NVIDIA GPU, the cache is on cpu"


class DecodeLoop:
    """Decode steps through tensors that stay where they are, as a CUDA graph needs them."""

    def __init__(self, layer: LayerCache, stream: Stream, queries: torch.Tensor) -> None:
        self.layer, self.stream, self.queries = copy_to(layer, "cuda"), stream, queries
        self.batch, self.tokens = (copy_to(item, "cuda") for item in stream.tokens(0, 1))
        self.batch.row_index, self.batch.positions  # made before a pass, which only reads them
        self.query = queries[0].cuda()

    def feed(self, token: int) -> None:
        batch, fresh = self.stream.tokens(token, token + 1)
        self.batch.positions.copy_(batch.positions)
        for mine, new in zip(self.batch.rotary or (), batch.rotary or (), strict=True):
            mine.copy_(new)
        for field in dataclasses.fields(fresh):
            if getattr(fresh, field.name) is not None:
                getattr(self.tokens, field.name).copy_(getattr(fresh, field.name))
        self.query.copy_(self.queries[token])

    def step(self) -> torch.Tensor:
        layer = self.layer
        seen = kernels.append_or_merge(layer, self.batch, self.tokens, self.stream.config)
        pages, rows = (layer.key_pages, layer.value_pages, layer.block_tables), self.batch.row_index
        return kernels.paged_attention(self.query, *pages, layer.lengths, 0.2, rows=rows, recent=seen.recent)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("settings", GATES, ids=str)
def test_a_captured_step_replays_as_the_reference_decodes(settings: dict | None, dtype: torch.dtype) -> None:
    config, time = gates_of(settings), 70
    expected = make_layer(config, head_dim=128, max_blocks=6, dtype=dtype)
    stream = Stream(expected, config, rows=[2, 0], time=time)
    queries = torch.randn(time, 2, 8, 128, generator=torch.Generator().manual_seed(3)).to(dtype)
    warm = DecodeLoop(expected, stream, queries)
    torch.cuda.set_sync_debug_mode("error")
    try:
        warm.step()  # compiles, on a layer of its own
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loop, graph = DecodeLoop(expected, stream, queries), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loop.step()  # recorded, not run
    for token in range(time):
        batch, tokens = stream.tokens(token, token + 1)
        seen = reference.append_or_merge(expected, batch, tokens, config)
        pages, rows = (expected.key_pages, expected.value_pages, expected.block_tables), batch.row_index
        wanted = reference.paged_attention(queries[token], *pages, expected.lengths, 0.2, rows=rows, recent=seen.recent)
        loop.feed(token)
        graph.replay()
        torch.testing.assert_close(captured.cpu(), wanted, rtol=0, atol=TOLERANCES[dtype])
    assert_same_state(loop.layer, expected, TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("head_dim", "block_size", "group"), [(64, 16, 8), (128, 64, 4), (256, 128, 1), (80, 32, 32)])
def test_decode_and_prefill_equal_the_reference_in_full_size(
    dtype: torch.dtype, head_dim: int, block_size: int, group: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4097, (8, 4), generator=generator).tolist()
    scaling = head_dim**-0.5
    place = ("cuda", dtype)
    tensors, recent = decode_case(place, lengths, group=group, head_dim=head_dim, delay=16, block_size=block_size)
    options = {"recent": recent, "return_scores": True}
    actual = kernels.paged_attention(*tensors, scaling, **options)
    wanted = reference.paged_attention(*tensors, scaling, **options)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCES[dtype])

    config = CompressionConfig(delay=16)
    layer = make_layer(config, head_dim=head_dim, block_size=block_size, max_blocks=-(-600 // block_size), dtype=dtype)
    layer = copy_to(layer, "cuda")
    stream = Stream(copy_to(layer, "cpu"), config, rows=[2, 0], time=600)
    batch, tokens = (copy_to(item, "cuda") for item in stream.tokens(0, [600, 450]))
    seen = reference.append_or_merge(layer, batch, tokens, config)
    query = torch.randn(batch.num_tokens, 2 * group, head_dim, generator=generator).to(*place)
    pages = layer.key_pages, layer.value_pages, layer.block_tables
    actual = kernels.prefill_attention(query, *pages, batch, seen, scaling)
    wanted = reference.prefill_attention(query, *pages, batch, seen, scaling)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=TOLERANCES[dtype])
