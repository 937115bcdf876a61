"""Compiled code is only given addresses of what it expects: on the CPU, of the right dtype and size, within bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from oracles.cache_layers import Stream, make_layer

from dmc.compression import CompressionConfig
from dmc.kernels import cpu
from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch

GATES = CompressionConfig(delay=2)


@pytest.fixture(autouse=True)
def compiled() -> None:
    if cpu.load_library() is None:
        pytest.skip("no C++ compiler")


def layer_and_tokens(
    config: CompressionConfig | None = GATES,
) -> tuple[LayerCache, ForwardBatch, NewTokens]:
    layer = make_layer(config, head_dim=16, block_size=16, max_blocks=4)
    stream = Stream(layer, config, rows=[2, 0], time=20)
    cpu.append_or_merge(layer, *stream.tokens(0, 10), config)
    return layer, *stream.tokens(10, [15, 13])


@pytest.mark.parametrize("move", [torch.float64, torch.bfloat16, "meta"], ids=str)
@pytest.mark.parametrize("name", ["key", "value", "omega", "decisions"])
def test_new_tokens_of_another_kind_are_refused(name: str, move: Any) -> None:
    layer, batch, tokens = layer_and_tokens()
    moved = dataclasses.replace(tokens, **{name: getattr(tokens, name).to(move)})
    before = layer.lengths.clone()
    with pytest.raises(ValueError, match=rf"kernels\.cpu: {name} is .*expected .*on cpu"):
        cpu.append_or_merge(layer, batch, moved, GATES)
    assert torch.equal(layer.lengths, before)


def test_a_batch_that_lies_elsewhere_is_refused() -> None:
    layer, batch, tokens = layer_and_tokens()
    with pytest.raises(ValueError, match=r"kernels\.cpu: rows is .*expected .*on cpu"):
        cpu.append_or_merge(layer, dataclasses.replace(batch, device="meta"), tokens, GATES)


@pytest.mark.parametrize("name", ["key", "value", "omega", "decisions"])
def test_new_tokens_of_another_size_are_refused(name: str) -> None:
    layer, batch, tokens = layer_and_tokens()
    cut = dataclasses.replace(tokens, **{name: getattr(tokens, name)[:1]})
    with pytest.raises(ValueError, match=rf"kernels\.cpu: {name} is "):
        cpu.append_or_merge(layer, batch, cut, GATES)
    assert batch.rotary is not None
    batch.rotary = batch.rotary[0][1:], batch.rotary[1]
    with pytest.raises(ValueError, match=r"kernels\.cpu: cos is "):
        cpu.append_or_merge(layer, batch, tokens, GATES)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("value_pages", lambda pages: pages.to("meta")),
        ("value_pages", lambda pages: pages[:-1]),
        ("key_pages", lambda pages: pages.transpose(0, 1).contiguous().transpose(0, 1)),
        ("lengths", lambda lengths: lengths.long()),
        ("lengths", lambda lengths: lengths.t().contiguous().t()),
        ("block_tables", lambda tables: tables.long()),
        ("free_blocks", lambda blocks: blocks[:-1]),
        ("history_key", lambda history: history.half()),
        ("history_omega", lambda history: history[:1]),
    ],
)
def test_a_cache_of_another_kind_is_refused(name: str, change: Any) -> None:
    layer, batch, tokens = layer_and_tokens()
    changed = dataclasses.replace(layer, **{name: change(getattr(layer, name))})
    with pytest.raises(ValueError, match=rf"kernels\.cpu: {name} is "):
        cpu.append_or_merge(changed, batch, tokens, GATES)


@pytest.mark.parametrize("rows", [[0, 3], [-1, 0]])
def test_rows_that_do_not_exist_are_refused(rows: list[int]) -> None:
    layer, batch, tokens = layer_and_tokens()
    message = "a cache row that does not exist"
    with pytest.raises(ValueError, match=message):
        cpu.append_or_merge(layer, dataclasses.replace(batch, rows=rows), tokens, GATES)
    pages, query = (layer.key_pages, layer.value_pages, layer.block_tables), torch.zeros(2, 4, 16)
    with pytest.raises(ValueError, match=message):
        cpu.paged_attention(query, *pages, layer.lengths, 0.3, rows=torch.tensor(rows))
    with pytest.raises(ValueError, match=message):
        cpu.compact(layer, torch.tensor(rows), torch.ones(2, 2, 64, dtype=torch.bool))


def test_more_tokens_than_tables_or_the_pool_can_take_are_refused_and_nothing_is_written() -> None:
    for change in ({"block_tables": 1}, {"num_free": 0}):
        layer, *_ = layer_and_tokens(None)
        stream = Stream(layer, None, rows=[2, 0], time=20)
        if "num_free" in change:
            layer.num_free.fill_(1)
        else:
            layer = dataclasses.replace(layer, block_tables=layer.block_tables[..., :1])
        before = layer.lengths.clone(), layer.num_free.clone()
        with pytest.raises(ValueError, match="block"):
            cpu.append_or_merge(layer, *stream.tokens(10, 20), None)
        assert torch.equal(layer.lengths, before[0]) and torch.equal(layer.num_free, before[1])


@pytest.mark.parametrize("move", [torch.float64, "meta"], ids=str)
def test_attention_refuses_what_lies_elsewhere(move: Any) -> None:
    layer, batch, _ = layer_and_tokens(None)
    pages, query = (layer.key_pages, layer.value_pages, layer.block_tables), torch.zeros(2, 4, 16)
    rows = torch.tensor([2, 0])
    with pytest.raises(ValueError, match=r"kernels\.cpu: value_pages is "):
        cpu.paged_attention(query, pages[0], pages[1].to(move), pages[2], layer.lengths, 0.3, rows=rows)
    if move == "meta":
        with pytest.raises(ValueError, match=r"kernels\.cpu: query is "):
            cpu.paged_attention(query.to(move), *pages, layer.lengths, 0.3, rows=rows)
    with pytest.raises(ValueError, match="more slots than"):
        cpu.paged_attention(query, *pages, layer.lengths + 64, 0.3, rows=rows)
    with pytest.raises(ValueError, match="more slots than"):
        cpu.paged_attention(query, *pages, layer.lengths, 0.3, rows=rows, return_scores=True, num_scores=9)
    with pytest.raises(ValueError, match="more slots than"):
        cpu.prefill_attention(torch.zeros(8, 4, 16), *pages, batch, VisibleKeys(torch.full((8, 2), 65)), 0.3)


def test_eviction_refuses_metadata_and_slots_that_do_not_fit() -> None:
    layer, batch, _ = layer_and_tokens(None)
    rows, pages = torch.tensor([2, 0]), layer.key_pages.shape[:2]
    layer.entry_metadata = {"position": torch.zeros(pages, dtype=torch.int32), "mass": torch.zeros(pages)}
    with pytest.raises(ValueError, match="an entry that is not held"):
        cpu.evict(layer, rows, torch.full((2, 2), 10))
    with pytest.raises(ValueError, match=r"kernels\.cpu: slots is "):
        cpu.evict(layer, rows, torch.zeros(2, 3, dtype=torch.long))
    cut = dataclasses.replace(layer, entry_metadata={"position": layer.entry_metadata["position"][:1]})
    with pytest.raises(ValueError, match=r"kernels\.cpu: pages is "):
        cpu.evict(cut, rows, torch.zeros(2, 2).long())
    with pytest.raises(ValueError, match=r"kernels\.cpu: pages is "):
        cpu.read_metadata(cut, rows, ["position"], 9)
    with pytest.raises(ValueError, match=r"kernels\.cpu: position is "):
        cpu.write_metadata(layer, batch, {"position": torch.zeros(8, 2)})
    many = ForwardBatch([2, 0], [0, 0], [11, 1])
    with pytest.raises(ValueError, match="an entry that is not held"):
        cpu.write_metadata(layer, many, {"position": torch.zeros(12, 2, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"kernels\.cpu: keep is "):
        cpu.compact(layer, rows, torch.ones(2, 2, 64))
    with pytest.raises(ValueError, match="more slots than"):
        cpu.compact(layer, rows, torch.ones(2, 2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"kernels\.cpu: scores is "):
        cpu.add_attention(layer, rows, torch.zeros(2, 4, 9), {"mass": 1}, 10)
    with pytest.raises(ValueError, match="more slots than"):
        cpu.add_attention(layer, rows, torch.zeros(2, 4, 9), {"mass": 1}, 9)
    positions = torch.zeros(2, 2, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match="more slots than"):
        cpu.eviction_candidate(torch.zeros(2, 2, 9), positions, torch.full((2, 2), 10), torch.tensor([3, 3]))


def test_linear_layers_elsewhere_are_left_to_torch() -> None:
    x, weight = torch.zeros(2, 64), torch.zeros(8, 64)
    assert cpu.linear(x.to("meta"), weight.to("meta"), None).device.type == "meta"
    with pytest.raises(RuntimeError):
        cpu.linear(torch.zeros(2, 32), weight, None)
