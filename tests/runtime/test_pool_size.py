import logging

import pytest
import torch
from measured_memory import allocated_peak
from runtime.test_windows import hybrid
from transformers import LlamaConfig

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.kernels.layout import CacheLayout
from dmc.policies import H2O, SnapKV
from dmc.runtime import pool_size
from dmc.runtime.pool_size import Activations, free_bytes, pool_bytes

CPU = torch.device("cpu")
NONE = Activations(0, 0, 0.0, 0.0)


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 1_000_000)
    return 1_000_000


def test_bytes_fractions_and_no_limit_are_what_they_say(free):
    assert pool_bytes(None, CPU, most=10, activations=NONE) is None
    assert pool_bytes(12345, CPU, most=10, activations=NONE) == 12345
    assert pool_bytes(0.25, CPU, most=10, activations=NONE) == free // 4
    assert pool_bytes(1.0, CPU, most=10, activations=NONE) == free
    assert pool_bytes(1, CPU, most=10, activations=NONE) == 1


def test_auto_takes_most_of_what_is_free_and_no_more_than_can_be_used(free, caplog):
    with caplog.at_level(logging.INFO, logger="dmc"):
        assert pool_bytes("auto", CPU, most=10**9, activations=NONE) == free // 2
        assert pool_bytes("auto/5", CPU, most=10**9, activations=NONE) == free // 10
    assert "memory=auto: 500000 bytes for the cache's pages, of 1000000 that are free on cpu" in caplog.text
    assert pool_bytes("auto", CPU, most=777, activations=NONE) == 777
    assert pool_bytes("auto", torch.device("cuda"), most=10**9, activations=NONE) == 850_000


@pytest.mark.parametrize("free_memory", [150_000, 1_500_000, 10**12])
def test_automatic_memory_leaves_room_for_tables_of_full_width(
    free_memory, make_compressed, make_recording, monkeypatch
):
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: free_memory)
    monkeypatch.setattr(Activations, "of", lambda *_, **__: NONE)
    engine, _ = make_recording(make_compressed(max_position_embeddings=4096), memory="auto", max_batch_size=30)
    cache, tables = engine.cache, engine.cache.block_tables
    pages, usable = cache.allocator.num_blocks * cache.block_bytes, free_memory // 2
    assert pages + tables.numel() * tables.element_size() <= usable + cache.block_bytes
    if free_memory < 10**12:  # and no less than there is
        assert pages + tables.numel() * tables.element_size() >= 0.9 * usable


def test_free_memory_is_found_without_psutil_too(monkeypatch):
    known = free_bytes(CPU)
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    assert 0 < free_bytes(CPU) < 10 * known  # what the system uses for files counts as taken


def test_an_engine_with_automatic_memory_holds_every_row_at_full_length(
    free, make_compressed, make_prompts, monkeypatch
):
    model = make_compressed(max_position_embeddings=100)
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 10**12)
    engine = Engine(model, memory="auto", max_batch_size=3)
    assert engine.cache.allocator.num_blocks == 3 * 2 * 2 * -(-100 // 16)
    assert not engine.cache.grows
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 2_000_000)
    engine = Engine(model, memory=0.5, max_batch_size=3)
    assert engine.cache.allocator.num_blocks == 1_000_000 // engine.cache.block_bytes
    (generation,) = engine.generate(make_prompts(9), SamplingParams(max_new_tokens=4))
    assert len(generation.token_ids) == 4


def test_auto_leaves_room_for_the_largest_pass_or_for_what_the_pool_can_feed(free):
    assert pool_bytes("auto", CPU, most=10**9, activations=Activations(200_000, 10**9, 9.0, 9.0)) == 300_000
    assert pool_bytes("auto", CPU, most=10**9, activations=Activations(10**12, 10**12, 3.0, 3.0)) == 125_000
    assert pool_bytes("auto", CPU, most=10**9, activations=Activations(10**12, 100_000, 9.0, 1.0)) == 200_000


def test_a_policy_leaves_pages_room_though_whole_prompts_pass_at_once():
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
    config.vocab_size, config.max_position_embeddings = 128_256, 131_072
    layout = CacheLayout(32, 8, 128, torch.bfloat16, CPU)
    pages = Activations.of(config, layout, 131_072 + 4096, 4096 + 16).room(64 * 2**30)
    alone = Activations.of(config, layout, 4096).room(64 * 2**30)
    assert pages > alone / 4


SHAPES = [
    {},
    {"hidden_size": 512},
    {"intermediate_size": 1024},
    {"head_dim": 128},
    {"vocab_size": 2000},
    {"dtype": torch.bfloat16, "hidden_size": 512, "head_dim": 128},
    {"gates": {"delay": 8}, "head_dim": 128},
    {"gates": {"window_size": None}, "num_layers": 1, "group": 1},
    {"policy": SnapKV(budget=Budget(ratio=4.0))},
    pytest.param({"policy": H2O(budget=Budget(ratio=4.0)), "kernels": "reference"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_pass_needs_more_than_auto_leaves(shape, make_stock, make_compressed, monkeypatch):
    options = {"max_position_embeddings": 256, "hidden_size": 64} | shape
    gates, policy, dtype, kernels = (options.pop(name, None) for name in ("gates", "policy", "dtype", "kernels"))
    model = make_stock(**options) if gates is None else make_compressed(gates=gates, **options)
    given = []
    monkeypatch.setattr(pool_size, "pool_bytes", lambda *arguments: given.append(arguments[3]) or 6_000_000)
    engine = Engine(model.to(dtype or torch.float32), policy=policy, kernels=kernels or "auto", token_budget=256)
    tokens = [token % 83 for token in range(257)]
    engine.generate([tokens[:40]], SamplingParams(max_new_tokens=2))
    peak = max(
        allocated_peak(lambda: engine.generate([tokens[:256]], SamplingParams(max_new_tokens=1))),
        allocated_peak(lambda: engine.score([tokens[:1]], [tokens[1:]])),
    )
    assert peak <= given[0].largest <= 12 * peak


@pytest.mark.parametrize("gates", [None, {"delay": 4}], ids=str)
def test_a_prompt_beside_decoding_requests_needs_no_rectangle(gates, make_stock, make_compressed):
    options = {"max_position_embeddings": 256, "hidden_size": 64, "head_dim": 64}
    model = make_stock(**options) if gates is None else make_compressed(gates=gates, **options)
    peaks = []
    for others in (0, 15):
        engine = Engine(model, kernels="reference", token_budget=256, max_batch_size=16)
        for token in range(others):
            engine.submit([token, token + 1], SamplingParams(max_new_tokens=9, ignore_eos=True))
        engine.step()
        engine.submit([token % 83 for token in range(240)], SamplingParams(max_new_tokens=1))
        peaks.append(allocated_peak(engine.step))
    assert peaks[1] <= 2 * peaks[0]


def test_automatic_memory_reserves_tables_of_windows_as_wide_as_they_are(make_recording, monkeypatch):
    free_memory = 3_000_000
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: free_memory)
    monkeypatch.setattr(Activations, "of", lambda *_, **__: NONE)
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    model = hybrid("gemma3_text", window=32, max_position_embeddings=8192, **layers)
    engine, _ = make_recording(model, memory="auto", max_batch_size=30)
    cache = engine.cache
    tables = sum(cache.fields[name].nbytes for name in ("block_tables", "ring_tables"))
    pages, usable = cache.allocator.num_blocks * cache.block_bytes, free_memory // 2
    assert 0.95 * usable <= pages + tables <= usable + cache.block_bytes
