"""The flash backend folds heads into the batch; a naive stand-in for flash-attn checks what it is called with."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from covering import cover
from oracles.cache_layers import Stream, fill, make_layer

from dmc.compression import CompressionConfig
from dmc.kernels import flash, reference
from dmc.kernels.base import Recent


def naive_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    empty_lse: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what flash_attn_with_kvcache documents, by loops: q [batch, 1, heads, D], pages [N, block, kv_heads, D]."""
    assert table.dtype == cache_seqlens.dtype == torch.int32
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[0], q.shape[2], 1), empty_lse)
    for row in range(q.shape[0]):
        length = int(cache_seqlens[row])
        keys, values = (
            torch.stack([pages[table[row, slot // pages.shape[1]], slot % pages.shape[1], 0] for slot in range(length)])
            if length
            else pages[0, :0, 0]
            for pages in (k_cache, v_cache)
        )
        if length:
            scores = q[row, 0] @ keys.T * softmax_scale
            out[row, 0], lse[row, :, 0] = scores.softmax(-1) @ values, scores.logsumexp(-1)
    return out, lse


def naive_varlen(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally, the last query to all keys, as both document; q [total, heads, D], lse [heads, total]."""
    assert table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32 and causal
    assert max_seqlen_q == cu_seqlens_q.diff().max() and len(cu_seqlens_q) == len(table) + 1
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2][::-1], torch.nan)
    for row, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        for index in range(begin, end):
            length = int(cache_seqlens[row]) - (end - 1 - index)
            one = q[None, index : index + 1], k_cache, v_cache, table[row : row + 1]
            counts = torch.tensor([length], dtype=torch.int32)
            output, log_sum = naive_decode(*one, counts, softmax_scale, torch.inf)
            out[index], lse[:, index] = output[0, 0], log_sum[0, :, 0]
    return out, lse


@pytest.fixture(params=["block_table", "page_table"])
def flash_attn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install flash-attn 2 (`block_table`) or FlashAttention-3 (`page_table`), as naive stand-ins."""

    def flash_2(
        q: Any, k_cache: Any, v_cache: Any, *, block_table: Any, return_softmax_lse: bool, **options: Any
    ) -> Any:
        assert return_softmax_lse
        return naive_decode(q, k_cache, v_cache, block_table, empty_lse=torch.inf, **options)

    def flash_2_varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        *,
        max_seqlen_k: int,
        block_table: Any,
        return_attn_probs: bool,
        **options: Any,
    ) -> Any:
        assert cu_seqlens_k.dtype == torch.int32 and max_seqlen_k >= cu_seqlens_k.diff().max()
        out, lse = naive_varlen(q, k, v, block_table, cu_seqlens_k.diff(), cu_seqlens_q, **options)
        return (out, lse, None) if return_attn_probs else out

    def flash_3(
        q: Any, k_cache: Any, v_cache: Any, *, page_table: Any, return_softmax_lse: bool = False, **options: Any
    ) -> Any:
        if "cu_seqlens_q" in options:
            out, lse = naive_varlen(q, k_cache, v_cache, page_table, **options)
            return (out, lse, None, None) if return_softmax_lse else out
        assert return_softmax_lse
        return *naive_decode(q, k_cache, v_cache, page_table, empty_lse=-torch.inf, **options), None, None

    name, function = {"block_table": ("flash_attn", flash_2), "page_table": ("flash_attn_interface", flash_3)}[
        request.param
    ]
    module = ModuleType(name)
    module.flash_attn_with_kvcache = function  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_2_varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    flash._library.cache_clear()
    yield request.param
    flash._library.cache_clear()


@pytest.mark.parametrize(("group", "rows", "delay"), cover((1, 4), (None, [2, 0]), (0, 4)), ids=str)
def test_heads_folded_into_the_batch_give_the_reference(
    flash_attn: str, group: int, rows: list[int] | None, delay: int
) -> None:
    layer = fill(make_layer(None), torch.tensor([[0, 1], [15, 16], [17, 40]]))
    generator, batch = torch.Generator().manual_seed(0), 3 if rows is None else 2
    query = torch.randn(batch, 2 * group, 16, generator=generator)
    key, value = torch.randn(2, batch * 4, 2, 16, generator=generator).unbind()
    exists = torch.tensor([[False] * 4, [True] * 4, [False, False, True, True]])[:batch].flatten()
    arguments = (query, layer.key_pages, layer.value_pages, layer.block_tables, layer.lengths, 0.25)
    options = {
        "rows": None if rows is None else torch.tensor(rows),
        "recent": Recent(key, value, exists) if delay else None,
    }
    actual = flash.paged_attention(*arguments, **options)
    torch.testing.assert_close(actual, reference.paged_attention(*arguments, **options), rtol=0, atol=1e-5)
    scored = flash.paged_attention(*arguments, **options, return_scores=True)
    wanted = reference.paged_attention(*arguments, **options, return_scores=True)
    torch.testing.assert_close(scored, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [None, CompressionConfig(delay=4)], ids=["full cache", "delayed gates"])
def test_prompts_give_the_reference_chunk_by_chunk(
    flash_attn: str, config: CompressionConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[str] = []
    load = flash.load_backend
    monkeypatch.setattr(flash, "load_backend", lambda *given: others.append("called") or load(*given))
    layer = make_layer(config, head_dim=16, max_blocks=3)
    stream, generator = Stream(layer, config, rows=[2, 0], time=40), torch.Generator().manual_seed(0)
    for begins, ends in (([0, 0], [17, 3]), ([17, 3], [31, 9])):
        batch, tokens = stream.tokens(begins, ends)
        query = torch.randn(batch.num_tokens, 6, 16, generator=generator)
        seen = reference.append_or_merge(layer, batch, tokens, config)
        arguments = query, layer.key_pages, layer.value_pages, layer.block_tables, batch, seen, 0.25
        actual = flash.prefill_attention(*arguments)
        torch.testing.assert_close(actual, reference.prefill_attention(*arguments), rtol=0, atol=1e-5)
        if config is None:
            actual = flash.prefill_attention(*arguments, return_lse=True)
            wanted = reference.prefill_attention(*arguments, return_lse=True)
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
    assert bool(others) == (config is not None)


def test_what_it_cannot_serve_is_said_with_a_way_out(flash_attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    assert flash.supports(torch.bfloat16, 128, 256, cuda) is None
    small_pages = flash.supports(torch.bfloat16, 128, 16, cuda)
    if flash_attn == "block_table":
        assert small_pages is not None and "multiples of 256" in small_pages and "kernels='triton'" in small_pages
    else:
        assert small_pages is None
    assert "dtype=torch.float32" in str(flash.supports(torch.float32, 128, 256, cuda))
    assert "head_dim=264" in str(flash.supports(torch.bfloat16, 264, 256, cuda))
    assert "the cache is on cpu" in str(flash.supports(torch.bfloat16, 128, 256, torch.device("cpu")))


def test_without_flash_attn_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    flash._library.cache_clear()
    with pytest.raises(ImportError, match=r"needs FlashAttention-3 .* or flash-attn 2 .*use kernels='triton'"):
        flash.supports(torch.bfloat16, 128, 256, torch.device("cuda"))
