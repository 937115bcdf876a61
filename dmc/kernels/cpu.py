"""The CPU backend: compiled code (`cpu.cpp`), or the reference where that is not available."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from dmc.compression import CompressionConfig
from dmc.kernels import reference
from dmc.kernels.base import LayerCache, LayerWeights, NewTokens, OpenSlotState, Recent, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.cpu_build import load_library
from dmc.kernels.cpu_call import SUFFIXES, call
from dmc.kernels.cpu_layers import STEP
from dmc.kernels.cpu_layers import fits as fits
from dmc.kernels.cpu_layers import gated_mlp as gated_mlp
from dmc.kernels.cpu_layers import linear as linear
from dmc.kernels.cpu_layers import linear_together as linear_together
from dmc.kernels.cpu_layers import rms_norm as rms_norm
from dmc.kernels.cpu_layers import rotate as rotate
from dmc.kernels.cpu_layers import rotates as rotates
from dmc.kernels.layout import history_size
from dmc.kernels.reference import append_to_ring as append_to_ring

DIM_STEP, MAX_DIM = 16, 256
"""Compiled head sizes: multiples of `DIM_STEP` up to `MAX_DIM`."""

P = ParamSpec("P")
R = TypeVar("R")


def supports(dtype: torch.dtype, head_dim: int, block_size: int, device: torch.device) -> str | None:
    """Return why this backend cannot serve such a cache, or None.

    Any dtype, head size and block size is served; in compiled code float32 and bfloat16 with a head size that is a
    multiple of 16, up to 256.
    """
    return None if device.type == "cpu" else f"kernels.cpu works on the CPU, not on {device}"


def _or_reference(function: Callable[P, R]) -> Callable[P, R]:
    """Let the reference serve where there are no compiled kernels."""

    @functools.wraps(function)
    def serve(*args: P.args, **options: P.kwargs) -> R:
        if load_library() is None:
            return getattr(reference, function.__name__)(*args, **options)  # type: ignore[no-any-return]
        return function(*args, **options)

    return serve


def append_or_merge(
    cache: LayerCache, batch: ForwardBatch, tokens: NewTokens, config: CompressionConfig | None
) -> VisibleKeys:
    """See `reference.append_or_merge`."""
    raw = _raw_like(cache)
    if not _has_code(cache.key_pages, raw):
        return reference.append_or_merge(cache, batch, tokens, config)
    sequences, num_tokens = len(batch.rows), batch.num_tokens
    heads, dim = cache.lengths.shape[1], cache.key_pages.shape[-1]
    key, value = _rows_of_channels(tokens.key), _rows_of_channels(tokens.value)
    merges = config is not None and config.action == "merge"
    delay = 0 if config is None else config.delay
    cos = sin = None
    if config is not None:
        assert batch.rotary is not None
        cos, sin = (table.float().contiguous() for table in batch.rotary)
        _expect("cos", cos, torch.float32, (num_tokens + sequences * delay, dim))
        _expect("sin", sin, torch.float32, cos.shape)
        assert tokens.decisions is not None and tokens.omega is not None
        _expect("decisions", tokens.decisions, torch.bool, (num_tokens, heads), dense=False)
        _expect("omega", tokens.omega, torch.float32, (num_tokens, heads), dense=False)
    _expect_cache(cache, config)
    _expect_batch(batch)
    _expect("key", key, raw.dtype, (num_tokens, heads, dim), dense=False)
    _expect("value", value, raw.dtype, (num_tokens, heads, dim), dense=False)
    seen = VisibleKeys(torch.empty(num_tokens, heads, dtype=torch.int32))
    if merges and batch.most_new > 1:
        seen.open_slot = OpenSlotState(*_raw(key, num_tokens))
    if delay > 0:
        seen.recent = Recent(*_raw(key, num_tokens + sequences * (delay - 1)))
    strides = *key.stride()[:2], *value.stride()[:2]
    gates = tokens.decisions, *_strides(tokens.decisions), tokens.omega, *_strides(tokens.omega)
    made = seen.slots, *_parts(seen.open_slot), *_parts(seen.recent)
    fields = _append_fields(cache, batch, config, (key, value, *strides), gates, (cos, sin), made)
    call("append_" + SUFFIXES[key.dtype], *fields)
    return seen


NO_TOKENS, NO_GATES, NOTHING_MADE = (None, None, 0, 0, 0, 0), (None, 0, 0, None, 0, 0), (None,) * 7
"""Fields of an append whose tokens compiled code makes itself."""


def _append_fields(
    cache: LayerCache,
    batch: ForwardBatch,
    config: CompressionConfig | None,
    tokens: tuple[Any, ...],
    gates: tuple[Any, ...],
    rotary: tuple[Tensor | None, Tensor | None],
    made: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return the fields of `Append`."""
    delay, window = (0, 0) if config is None else (config.delay, config.window_size or 0)
    return (
        *(len(batch.rows), cache.lengths.shape[1], cache.key_pages.shape[-1], cache.block_size),
        *(history_size(config), delay, torch.get_num_threads()),
        *(config is not None, config is not None and config.action == "merge", window),
        *(batch.row_index, batch.cu_seqlens, batch.positions, *tokens, *gates, *rotary),
        *(*_entry_pages(cache), cache.free_blocks, cache.num_free, *_table(cache.block_tables), cache.lengths),
        *(cache.history_key, cache.history_value, cache.history_decisions, cache.history_omega),
        *(cache.mean, cache.weight, *made, *_bounds(cache.block_tables, cache.block_size)),
    )


def why_not_whole(weights: LayerWeights, cache: LayerCache, config: CompressionConfig | None) -> str | None:
    """Say why `decode_layer` cannot serve a layer with these weights and this cache; None if it can."""
    raw, heads = _raw_like(cache), cache.lengths.shape[1]
    if not _has_code(cache.key_pages, raw) or cache.entry_metadata or cache.sinks is not None:
        return "its cache"
    _expect_cache(cache, config)
    dim, hidden, between = cache.key_pages.shape[-1], weights.norm.shape[0], weights.up[0].shape[0]
    of_queries = weights.query[0].shape[0]
    sizes = {"query": (of_queries, hidden), "key": (heads * dim, hidden), "value": (heads * dim, hidden)}
    sizes |= {"output": (hidden, of_queries), "gate": (between, hidden), "up": (between, hidden)}
    sizes |= {"down": (hidden, between), "adapter": (2 * heads, hidden)}
    if hidden % STEP or between % STEP or dim % STEP or of_queries % (heads * dim):
        return "its sizes"
    for name, size in sizes.items():
        weight, bias = getattr(weights, name)
        if weight is None and name == "adapter":
            continue
        parts = [(weight, size), *([] if bias is None else [(bias, size[:1])])]
        if not all(_is_dense(part, raw.dtype, shape) for part, shape in parts):
            return f"its {name}"
    if not all(_is_dense(norm, raw.dtype, (hidden,)) for norm in (weights.norm, weights.mlp_norm)):
        return "its norms"
    return None


def decode_layer(
    x: Tensor,
    weights: LayerWeights,
    cache: LayerCache,
    batch: ForwardBatch,
    config: CompressionConfig | None,
    rotary: tuple[Tensor, Tensor],
    scaling: float,
) -> Tensor:
    """Run a decoder layer like Llama's, cache, gates and MLP included, over one token of each sequence in one call.

    Args:
        x: hidden states, [1, S, hidden], at most `ROWS` of them.
        weights: see `why_not_whole`, which has found nothing.
        cache: of the layer.
        batch: which sequences.
        config: of gates that read the hidden state and decide for each head; None: there are none.
        rotary: cos and sin by halves, float32: without gates at the new tokens, [S, D], else those of `batch`.
        scaling: factor on the scores.
    Returns:
        [1, S, hidden].
    """
    num_sequences, hidden, between = len(batch.rows), x.shape[-1], weights.up[0].shape[0]
    delay = 0 if config is None else config.delay
    _expect("hidden states", x, weights.norm.dtype, (1, num_sequences, hidden))
    for name, table in zip(("cos", "sin"), rotary, strict=True):
        _expect(name, table, torch.float32, (num_sequences * (1 + delay), cache.key_pages.shape[-1]))
    _expect_batch(batch)
    out = torch.empty(x.shape, dtype=x.dtype)
    gates: tuple[Any, ...] = (0.0, 0.0, 0.0, 0.0, False)
    if config is not None:
        gates = config.decision_scale, config.decision_offset, config.omega_offset, config.eps
        gates = *map(float, gates), config.weighting == "learned"
    mlp = num_sequences, hidden, between, torch.get_num_threads(), None, *weights.gate, *weights.up, *weights.down
    group = weights.query[0].shape[0] // weights.key[0].shape[0]
    call(
        "decode_layer_" + SUFFIXES[x.dtype],
        *(hidden, group, x, weights.norm, weights.mlp_norm, float(weights.norm_eps), float(weights.mlp_norm_eps)),
        *(*weights.query, *weights.key, *weights.value, *weights.output, *weights.adapter, *gates),
        *(*mlp, hidden, None, float(scaling), out),
        *_append_fields(cache, batch, config, NO_TOKENS, NO_GATES, rotary, NOTHING_MADE),
    )
    return out


@_or_reference
def compact(cache: LayerCache, rows: Tensor, keep: Tensor) -> None:
    """See `reference.compact`."""
    keep = keep.contiguous()
    _expect("keep", keep, torch.bool, (len(rows), cache.lengths.shape[1], keep.shape[-1]))
    call("compact", *_heads(cache, rows, cache.slot_pages), keep, keep.shape[-1])


@_or_reference
def evict(cache: LayerCache, rows: Tensor, slots: Tensor) -> None:
    """See `reference.evict`."""
    slots = slots.contiguous()
    _expect("slots", slots, torch.int64, (len(rows), cache.lengths.shape[1]))
    call("evict", *_heads(cache, rows, cache.slot_pages), slots)


@_or_reference
def write_metadata(cache: LayerCache, batch: ForwardBatch, metadata: dict[str, Tensor]) -> None:
    """See `reference.write_metadata`."""
    pages = [cache.entry_metadata[name] for name in metadata]
    numbers = [values.contiguous() for values in metadata.values()]
    for name, page, values in zip(metadata, pages, numbers, strict=True):
        _expect(name, values, page.dtype, (batch.num_tokens, cache.lengths.shape[1]))
    _expect_batch(batch)
    addresses = _int64s(values.data_ptr() for values in numbers)
    call("write_metadata", *_heads(cache, batch.row_index, pages), batch.cu_seqlens, addresses)


@_or_reference
def read_metadata(cache: LayerCache, rows: Tensor, names: Sequence[str], num_slots: int) -> list[Tensor]:
    """See `reference.read_metadata`."""
    pages = [cache.entry_metadata[name] for name in names]
    read = [page.new_empty(len(rows), cache.lengths.shape[1], num_slots) for page in pages]
    addresses = _int64s(values.data_ptr() for values in read)
    fills = _int64s(0 if page.is_floating_point() else -1 for page in pages)
    call("read_metadata", *_heads(cache, rows, pages), num_slots, addresses, fills)
    return read


@_or_reference
def add_attention(cache: LayerCache, rows: Tensor, scores: Tensor, powers: dict[str, int], num_slots: int) -> Tensor:
    """See `reference.add_attention`."""
    sequences, kv_heads = len(rows), cache.lengths.shape[1]
    query_heads = scores.shape[1] // kv_heads * kv_heads
    _expect("scores", scores, torch.float32, (sequences, query_heads, max(scores.shape[-1], num_slots)), dense=False)
    assert scores.stride(-1) == 1
    attention = torch.empty(sequences, kv_heads, num_slots)
    heads = _heads(cache, rows, [cache.entry_metadata[name] for name in powers])
    scored = (scores, *scores.stride()[:2], _int64s(powers.values()), attention)
    call("add_attention", *heads, query_heads // kv_heads, num_slots, *scored)
    return attention


@_or_reference
def nth_newest(positions: Tensor, counts: Tensor) -> Tensor:
    """See `reference.nth_newest`."""
    positions, counts = positions.contiguous(), counts.contiguous()
    _expect("positions", positions, torch.int32, positions.shape)
    _expect("counts", counts, torch.int64, positions.shape[:-1])
    found = torch.empty(counts.shape, dtype=torch.int32)
    call("nth_newest", counts.numel(), positions.shape[-1], torch.get_num_threads(), positions, counts, found)
    return found


@_or_reference
def eviction_candidate(scores: Tensor, positions: Tensor, lengths: Tensor, limits: Tensor) -> Tensor:
    """See `reference.eviction_candidate`."""
    scores, slots = _rows_of_channels(scores), torch.empty(lengths.shape, dtype=torch.int64)
    positions, lengths, limits = positions.contiguous(), lengths.contiguous(), limits.contiguous()
    _expect("scores", scores, torch.float32, (*lengths.shape, scores.shape[-1]), dense=False)
    _expect("positions", positions, torch.int32, scores.shape)
    _expect("lengths", lengths, torch.int64, scores.shape[:2])
    _expect("limits", limits, torch.int64, scores.shape[:1])
    given = (scores, *scores.stride()[:2], positions, lengths, limits, slots)
    call("eviction_candidate", *scores.shape, torch.get_num_threads(), *given)
    return slots


def attention_received(
    query: Tensor, cache: LayerCache, batch: ForwardBatch, slots: Tensor, scaling: float, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """See `dmc.kernels.probabilities.attention_received`."""
    if not _has_code(cache.key_pages, query):
        return reference.attention_received(query, cache, batch, slots, scaling, lse)
    query, slots, lse = _rows_of_channels(query), slots.int().contiguous(), lse.contiguous()
    heads, num_entries = cache.lengths.shape[1], int(slots.max())
    group = query.shape[1] // heads
    _expect("slots", slots, torch.int32, (batch.num_tokens, heads))
    queries = (batch.num_tokens, group * heads, cache.key_pages.shape[-1])
    _expect("query", query, query.dtype, queries, dense=False)
    _expect("lse", lse, torch.float32, queries[:2])
    _expect_batch(batch)
    columns = torch.zeros(len(batch.rows), heads, group, num_entries)
    squares = torch.zeros(len(batch.rows), heads, num_entries)
    keys = [cache.key_pages] if cache.key_scales is None else [cache.key_pages, cache.key_scales]
    call(
        _named("receive", query, cache.key_pages),
        *_heads(cache, batch.row_index, keys),
        *(query.shape[-1], group, batch.most_new, num_entries, float(scaling), batch.cu_seqlens),
        *(query, *query.stride()[:2], slots, lse, columns, squares),
    )
    return columns, squares


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scaling: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    rows: Tensor | None = None,
    recent: Recent | None = None,
    return_scores: bool = False,
    num_scores: int | None = None,
    chunk_ends: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.paged_attention`."""
    if not _has_code(key_pages, query):
        options: dict[str, Any] = {"scales": scales, "rows": rows, "recent": recent, "sinks": sinks}
        options |= {"return_scores": return_scores, "num_scores": num_scores, "bias": bias}
        return reference.paged_attention(query, key_pages, value_pages, block_tables, lengths, scaling, **options)
    scores = None
    if return_scores:
        scores = torch.zeros(*query.shape[:2], num_scores or block_tables.shape[-1] * key_pages.shape[1])
    pages = key_pages, value_pages, block_tables
    seen = VisibleKeys(lengths, recent=recent)
    attended = _attend(query, *pages, seen, scaling, scales, rows, scores=scores, sinks=sinks, bias=bias)
    return attended if scores is None else (attended, scores)


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    batch: ForwardBatch,
    seen: VisibleKeys,
    scaling: float,
    scales: tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.prefill_attention`."""
    pages = key_pages, value_pages, block_tables
    if not _has_code(key_pages, query):
        return reference.prefill_attention(query, *pages, batch, seen, scaling, scales, return_lse, sinks, bias)
    _expect_batch(batch)
    lse = torch.empty(query.shape[:2]) if return_lse else None
    options: dict[str, Any] = {"batch": batch, "lse": lse, "sinks": sinks, "bias": bias}
    attended = _attend(query, *pages, seen, scaling, scales, batch.row_index, **options)
    return attended if lse is None else (attended, lse)


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    seen: VisibleKeys,
    scaling: float,
    scales: tuple[Tensor, Tensor] | None,
    rows: Tensor | None,
    *,
    batch: ForwardBatch | None = None,
    scores: Tensor | None = None,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend from queries [T, H_q, D]; without a batch, one per sequence, and the visible slots are [C, H] by row."""
    query = _rows_of_channels(query)
    num_tokens, heads, dim = query.shape
    num_rows, kv_heads, _ = block_tables.shape
    sequences = num_tokens if batch is None else len(batch.rows)
    slots = seen.slots.int().contiguous()
    tables = block_tables.int().contiguous()
    key_pages, value_pages = key_pages.contiguous(), value_pages.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    open_slot, recent = _contiguous(seen.open_slot), _contiguous(seen.recent)
    wanted = num_tokens if batch is None else batch.num_tokens
    _expect("query", query, query.dtype, (wanted, heads // kv_heads * kv_heads, key_pages.shape[-1]), False)
    _expect_pages(key_pages, value_pages, *(scales or (None, None)))
    if bias is not None:
        _expect("bias", bias, torch.float32, key_pages.shape[:2])
    _expect("block_tables", tables, torch.int32, tables.shape)
    _expect("slots", slots, torch.int32, (num_rows if batch is None else num_tokens, kv_heads))
    if rows is not None:
        _expect("rows", rows, torch.int64, (sequences,))
    delay = 0 if recent is None else (len(recent.exists) - num_tokens) // sequences + 1
    for raw, extra in ((open_slot, 0), (recent, sequences * (delay - 1))):
        if raw is not None:
            _expect("raw keys", raw.key, query.dtype, (num_tokens + extra, kv_heads, dim))
            _expect("raw values", raw.value, query.dtype, raw.key.shape)
            _expect("exists", raw.exists, torch.bool, raw.key.shape[:1])
    call(
        _named("attend", query, key_pages),
        *(sequences, kv_heads, heads // kv_heads, dim, key_pages.shape[1], torch.get_num_threads(), float(scaling)),
        *(None if batch is None else batch.cu_seqlens, query, *query.stride()[:2], key_pages, value_pages),
        *(
            *(scales or (None, None)),
            bias,
            rows,
            *_table(tables),
            slots,
            batch is None,
            *_parts(open_slot),
            *_parts(recent),
        ),
        *(delay, out, scores, 0 if scores is None else scores.shape[-1], lse, *_bounds(tables, key_pages.shape[1])),
        _sinks(sinks, query),
    )
    return out


def _sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    sinks = sinks.detach().float().contiguous()
    _expect("sinks", sinks, torch.float32, query.shape[1:2])
    return sinks


def _named(work: str, query: Tensor, pages: Tensor) -> str:
    """Name the compiled function of the dtypes of queries and pages."""
    return f"{work}_{SUFFIXES[query.dtype]}" + ("_int8" if pages.dtype == torch.int8 else "")


def _expect_batch(batch: ForwardBatch) -> None:
    _expect("rows", batch.row_index, torch.int64, (len(batch.rows),))
    _expect("cu_seqlens", batch.cu_seqlens, torch.int64, (len(batch.rows) + 1,))
    _expect("positions", batch.positions, torch.int64, (batch.num_tokens,))


def _heads(cache: LayerCache, rows: Tensor, pages: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the fields of `Heads` for slot data in `pages`."""
    _expect_cache(cache, None)
    _expect("rows", rows, torch.int64, (len(rows),))
    for page in pages:
        _expect("pages", page, page.dtype, (*cache.key_pages.shape[:2], *page.shape[2:]))
    addresses = _int64s(page.data_ptr() for page in pages)
    widths = _int64s(page.stride(1) * page.element_size() for page in pages)
    return (
        *(len(rows), cache.lengths.shape[1], cache.block_size, torch.get_num_threads(), rows),
        *(addresses, widths, len(addresses), cache.free_blocks, cache.num_free),
        *(*_table(cache.block_tables), cache.lengths, *_bounds(cache.block_tables, cache.block_size)),
    )


def _int64s(numbers: Iterable[int]) -> ctypes.Array[ctypes.c_int64]:
    listed = list(numbers)
    return (ctypes.c_int64 * len(listed))(*listed)


def _bounds(tables: Tensor, block_size: int) -> tuple[int, int]:
    """Return the number of rows of a cache, and of slots that the table of a head can name."""
    return tables.shape[0], tables.shape[2] * block_size


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], dense: bool = True) -> None:
    """Refuse a tensor that compiled code, which sees only its address, would misread."""
    if tensor.is_cpu and tensor.dtype is dtype and tensor.shape == shape and (not dense or tensor.is_contiguous()):
        return
    raise ValueError(
        f"kernels.cpu: {name} is {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}; "
        f"expected {dtype} {tuple(shape)}{', dense' if dense else ''} on cpu (an engine serves its model where it was "
        "when the engine was made)"
    )


def _is_dense(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return tensor.is_cpu and tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous()


def _expect_cache(cache: LayerCache, config: CompressionConfig | None) -> None:
    """Refuse a cache that differs from its compiled mirror; checks the gates' state that `config` uses."""
    pages, (rows, heads, width) = cache.key_pages, cache.block_tables.shape
    _expect_pages(pages, cache.value_pages, cache.key_scales, cache.value_scales)
    _expect("free_blocks", cache.free_blocks, torch.int32, pages.shape[:1])
    _expect("num_free", cache.num_free, torch.int32, (1,))
    _expect("block_tables", cache.block_tables, torch.int32, (rows, heads, width))
    _expect("lengths", cache.lengths, torch.int32, (rows, heads))
    size, dim = history_size(config), pages.shape[-1]
    if size > 0:
        dtype = _raw_like(cache).dtype
        _expect("history_key", cache.history_key, dtype, (rows, heads, size, dim))
        _expect("history_value", cache.history_value, dtype, (rows, heads, size, dim))
        _expect("history_decisions", cache.history_decisions, torch.bool, (rows, heads, size))
        _expect("history_omega", cache.history_omega, torch.float32, (rows, heads, size))
    if cache.mean is not None and cache.weight is not None:
        _expect("mean", cache.mean, torch.float32, (rows, heads, 2 * dim))
        _expect("weight", cache.weight, torch.float32, (rows, heads))


def _raw_like(cache: LayerCache) -> Tensor:
    """Return a tensor of the dtype of raw tokens."""
    return cache.history_key if cache.key_pages.dtype == torch.int8 else cache.key_pages


def _expect_pages(key: Tensor, value: Tensor, key_scales: Tensor | None, value_scales: Tensor | None) -> None:
    if (key.dtype == torch.int8) == (key_scales is None):
        raise ValueError(f"kernels.cpu: {key.dtype} pages {'without' if key_scales is None else 'with'} scales")
    _expect("key_pages", key, key.dtype, key.shape)
    _expect("value_pages", value, key.dtype, key.shape)
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is not None:
            _expect(name, scales, torch.float32, (*key.shape[:2], 1))


def _has_code(pages: Tensor, states: Tensor) -> bool:
    """Whether there are compiled kernels for pages, and for queries or new tokens; else the reference has to serve."""
    dim, alike = pages.shape[-1], pages.dtype in (states.dtype, torch.int8)
    if alike and states.dtype in SUFFIXES and dim % DIM_STEP == 0 and dim <= MAX_DIM:
        return load_library() is not None
    given = f"{pages.dtype} with head_dim={dim}" + ("" if states.dtype == pages.dtype else f", {states.dtype} queries")
    _warn_once(
        f"kernels.cpu has no compiled code for {given}: the slower reference backend serves; compiled are "
        f"{' and '.join(map(str, SUFFIXES))}, pages alike or int8, with head_dim a multiple of {DIM_STEP} up to "
        f"{MAX_DIM}"
    )
    return False


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _rows_of_channels(states: Tensor) -> Tensor:
    """Make the channels of each head contiguous; the kernels follow all other strides."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _contiguous(raw: OpenSlotState | Recent | None) -> OpenSlotState | Recent | None:
    if raw is None:
        return None
    return type(raw)(raw.key.contiguous(), raw.value.contiguous(), raw.exists.contiguous())


def _raw(like: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate key, value and exists of tokens, for heads like those of `like` [T, H, D]."""
    both = torch.empty(2, num_tokens, *like.shape[1:], dtype=like.dtype)
    return both[0], both[1], torch.empty(num_tokens, dtype=torch.bool)


def _strides(gate: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if gate is None else gate.stride()


def _parts(raw: OpenSlotState | Recent | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if raw is None else (raw.key, raw.value, raw.exists)


def _table(tables: Tensor) -> tuple[Any, ...]:
    return (tables, *tables.stride()[:2])


def _entry_pages(cache: LayerCache) -> tuple[Tensor | None, ...]:
    return cache.key_pages, cache.value_pages, cache.key_scales, cache.value_scales
