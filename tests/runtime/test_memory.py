import logging

import pytest
import torch

from dmc import Engine, SamplingParams
from dmc.runtime import memory
from dmc.runtime.memory import free_bytes, pool_bytes

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1_000_000)
    return 1_000_000


def test_bytes_fractions_and_no_limit_are_what_they_say(free: int) -> None:
    assert pool_bytes(None, CPU, most=10) is None
    assert pool_bytes(12345, CPU, most=10) == 12345
    assert pool_bytes(0.25, CPU, most=10) == free // 4
    assert pool_bytes(1.0, CPU, most=10) == free
    assert pool_bytes(1, CPU, most=10) == 1


def test_auto_takes_most_of_what_is_free_and_no_more_than_can_be_used(
    free: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dmc"):
        assert pool_bytes("auto", CPU, most=10**9) == free // 2
    assert "memory=auto: 500000 bytes for the cache's pages, of 1000000 that are free on cpu" in caplog.text
    assert pool_bytes("auto", CPU, most=777) == 777
    assert pool_bytes("auto", torch.device("cuda"), most=10**9) == 850_000


@pytest.mark.parametrize("setting", [0, -1, 0.0, -0.5, 1.5, float("nan"), "lots", "", True, [5]])
def test_settings_out_of_range_are_refused(setting: object) -> None:
    with pytest.raises(ValueError, match=r"memory=.*expected a whole number of bytes > 0, a float in"):
        pool_bytes(setting, CPU, most=10)  # type: ignore[arg-type]


def test_free_memory_is_found_without_psutil_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = free_bytes(CPU)
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    assert free_bytes(CPU) > 0
    assert 0.1 < free_bytes(CPU) / known < 10


def test_an_engine_with_automatic_memory_holds_every_row_at_full_length(
    free: int, make_compressed: object, make_prompts: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_compressed(max_position_embeddings=100)  # type: ignore[operator]
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    engine = Engine(model, memory="auto", max_batch_size=3)
    assert engine.cache.allocator.num_blocks == 3 * 2 * 2 * -(-100 // 16)
    assert not engine.cache.grows
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2_000_000)
    engine = Engine(model, memory=0.5, max_batch_size=3)
    assert engine.cache.allocator.num_blocks == 1_000_000 // engine.cache.block_bytes
    (generation,) = engine.generate(make_prompts(9), SamplingParams(max_new_tokens=4))  # type: ignore[operator]
    assert len(generation.token_ids) == 4
