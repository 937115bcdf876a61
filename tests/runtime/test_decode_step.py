"""A recorded step of decoding, replayed with other contents of its buffers, is the step itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recording import Recorder

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.runtime.decode_steps import GpuRecorder, bucket_of, why_not_recorded

METHODS: dict[str, Any] = {
    "full cache": None,
    "SnapKV": policies.SnapKV(budget=Budget(ratio=2)),
    "LocalWindow": policies.LocalWindow(budget=Budget(tokens=12)),
    "StreamingLLM": policies.StreamingLLM(budget=Budget(ratio=2)),
    "H2O": policies.H2O(budget=Budget(ratio=2)),
    "H2O, 12 entries": policies.H2O(budget=Budget(tokens=12)),
    "TOVA": policies.TOVA(budget=Budget(ratio=2)),
    "RoCo": policies.RoCo(budget=Budget(ratio=2)),
    "CaM": policies.CaM(budget=Budget(ratio=2)),
    "D2O": policies.D2O(budget=Budget(ratio=2)),
    "D2O, 12 entries": policies.D2O(budget=Budget(tokens=12)),
    "CAKE, 12 entries": policies.CAKE(budget=Budget(tokens=12), window=4),
    "VATP": policies.VATP(budget=Budget(ratio=3)),
    "merge": {},
    "merge, exact": {"window_size": None},
    "merge, delay 4": {"delay": 4},
    "drop, delay 4": {"action": "drop", "delay": 4},
    "every fourth": {"decisions": "fixed", "weighting": "uniform", "window_size": None, "target_ratio": 4.0},
}


QUICK = ("full cache", "H2O", "D2O, 12 entries", "merge, delay 4", "drop, delay 4", "every fourth")
EVERY = [method if method in QUICK else pytest.param(method, marks=pytest.mark.slow) for method in METHODS]


def made(method: str, make_stock: Any, make_compressed: Any) -> tuple[Any, Any]:
    """Make a model, and its policy."""
    gates = METHODS[method]
    if isinstance(gates, dict):
        return make_compressed(gates=gates), None
    return make_stock(), gates


@pytest.mark.parametrize("method", EVERY)
def test_a_recorded_step_replayed_through_arrivals_finishes_and_growth_gives_the_eager_tokens(
    method: str,
    make_stock: Any,
    make_compressed: Any,
    make_prompts: Any,
    make_recording: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dmc.runtime.block_pool.FIRST_POOL_BLOCKS", 40)  # it grows
    model, policy = made(method, make_stock, make_compressed)
    eager = Engine(model, policy=policy, kernels="reference")
    engine, record = make_recording(model, policy=policy, max_batch_size=6, token_budget=64)
    prompts = make_prompts(5, 40, 90, 17, 30)
    params = [
        SamplingParams(max_new_tokens=30, temperature=0.8, seed=0, top_logprobs=2),
        SamplingParams(max_new_tokens=50, temperature=0),
        SamplingParams(max_new_tokens=12, seed=2, top_k=9, min_p=0.01),
        SamplingParams(max_new_tokens=25, temperature=0, repetition_penalty=1.1),
        SamplingParams(max_new_tokens=25, seed=3, top_p=0.9, n=2),
    ]
    expected = eager.generate(prompts, params)
    requests = []
    for prompt, sampling in zip(prompts, params, strict=True):
        requests.append(engine.submit(prompt, sampling))
        for _ in range(7):
            engine.step()
    engine.run(requests)
    for request, reference in zip(requests, expected, strict=True):
        assert request.generation is not None
        assert request.generation.token_ids == reference.token_ids
        assert request.generation.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
        assert [list(top) for top in request.generation.top_logprobs] == [list(top) for top in reference.top_logprobs]
        assert [alternative.token_ids for alternative in request.generation.alternatives] == [
            alternative.token_ids for alternative in reference.alternatives
        ]
        ours, theirs = request.generation.stats, reference.stats
        assert torch.equal(ours.slots, theirs.slots)
        torch.testing.assert_close(ours.mean_slots, theirs.mean_slots)
        assert ours.mean_bytes_allocated == theirs.mean_bytes_allocated
    assert 4 <= record.num_recorded < record.num_replayed / 5  # again when tables or pool have moved
    assert engine.cache.place > 0
    assert record.num_dropped > 1
    assert engine.blocks_in_use == 0


def test_nothing_is_recorded_anew_while_a_batch_stays_in_its_bucket(
    make_compressed: Any, make_prompts: Any, make_recording: Any
) -> None:
    model, greedy = make_compressed(), SamplingParams(max_new_tokens=200, temperature=0, ignore_eos=True)
    engine, record = make_recording(model, memory=2**22, max_batch_size=8)
    requests = [engine.submit(prompt, greedy) for prompt in make_prompts(*range(20, 28))]
    while min(len(request.logprobs) for request in requests) < 20:  # tables have their width
        engine.step()
    before = record.num_recorded
    for request in requests[:3]:  # 7, 6, 5 in the bucket of 8
        engine.abort(request)
        for _ in range(5):
            engine.step()
    assert record.num_recorded == before
    engine.abort(requests[3])
    for _ in range(3):
        engine.step()
    assert record.num_recorded == before + 1
    assert [bucket_of(count, 12) for count in range(1, 13)] == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]


@pytest.mark.parametrize("method", ["full cache", "merge, delay 4"])
def test_under_a_fixed_memory_nothing_is_ever_recorded_again(
    method: str, make_stock: Any, make_compressed: Any, make_prompts: Any, make_recording: Any
) -> None:
    model, _ = made(method, make_stock, make_compressed)
    engine, record = make_recording(model, memory=2**22, max_batch_size=4)
    begin = engine.cache.place
    for length in (9, 120):
        params = [
            SamplingParams(max_new_tokens=10, ignore_eos=True, temperature=0.5, seed=1, top_k=top_k, top_logprobs=top)
            for top_k, top in ((3, 0), (50, 2), (64, 20))
        ]
        for count in (1, 2, 3):
            engine.generate(make_prompts(*[length] * count), params[:count])
    assert engine.cache.place == begin
    assert record.num_dropped == 1  # before the first step
    assert record.num_recorded == 3  # one, two and up to four sequences, whatever they ask for


def test_a_step_that_cannot_be_recorded_runs_eagerly_from_then_on(
    make_compressed: Any, make_prompts: Any, make_recording: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, params = make_compressed(), SamplingParams(max_new_tokens=20, temperature=0)
    expected = Engine(model, kernels="reference").generate(make_prompts(5, 40), params)
    attempts = []

    class Refusing(Recorder):
        def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
            attempts.append(step)
            raise RuntimeError("operation not permitted when stream is capturing")

    engine, _ = make_recording(model, recorder=Refusing)
    with caplog.at_level(logging.WARNING):
        found = engine.generate(make_prompts(5, 40), params)
    assert [generation.token_ids for generation in found] == [generation.token_ids for generation in expected]
    assert len(attempts) == 1
    assert [record.message for record in caplog.records] == [
        "decoding goes on without CUDA graphs: a step could not be recorded"
    ]


def test_recorders_share_neither_stream_nor_pool_and_leave_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[Any, Any, Any]] = []
    current: dict[str, Any] = {"device": 0, "stream": "default"}

    @contextmanager
    def device(index: torch.device) -> Any:
        before, current["device"] = current["device"], index.index
        yield
        current["device"] = before

    class Graph:
        def __init__(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> None:
            captured.append((pool, stream, current["device"]))
            self.stream = stream

        def __enter__(self) -> None:
            self.before, current["stream"] = current["stream"], self.stream

        def __exit__(self, kind: Any, *_: Any) -> None:
            if kind is not None:  # as torch's does, whose end of a capture raises
                raise RuntimeError("capture was invalidated")
            current["stream"] = self.before

    class FakeGraph:
        def replay(self) -> None:
            pass

    for name, fake in {
        "device": device,
        "Stream": lambda device: object(),
        "graph_pool_handle": object,
        "CUDAGraph": FakeGraph,
        "graph": Graph,
        "current_stream": lambda: current["stream"],
        "set_stream": lambda stream: current.update(stream=stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    first, second = (GpuRecorder(torch.device("cuda", 1)) for _ in range(2))
    result = torch.ones(1), None
    assert first(lambda: result)() is result
    first(lambda: result)
    first.drop()
    first(lambda: result)
    second(lambda: result)
    (pool, stream, _), again, fresh, other = captured
    assert again == (pool, stream, 1)
    assert fresh[0] is not pool and fresh[1] is stream
    assert other[0] not in (pool, fresh[0]) and other[1] is not stream
    assert {where for *_, where in captured} == {1} and current["device"] == 0

    def waits() -> Any:
        raise ValueError("waits for the device")

    with pytest.raises(RuntimeError, match="invalidated"):
        first(waits)
    assert current["stream"] == "default"


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_cuda_graph_gives_the_eager_tokens(
    method: str, make_stock: Any, make_compressed: Any, make_prompts: Any
) -> None:
    model, policy = made(method, make_stock, make_compressed)
    prompts, params = make_prompts(5, 40, 90, 17, 3, 61), SamplingParams(max_new_tokens=60, temperature=0)
    expected = Engine(model.cuda(), policy=policy).generate(prompts, params)
    engine = Engine(model, policy=policy, cuda_graphs=True)
    for ours, reference in zip(engine.generate(prompts, params), expected, strict=True):
        assert ours.token_ids == reference.token_ids
        assert torch.equal(ours.stats.slots, reference.stats.slots)


def test_what_cannot_be_recorded_is_told(make_stock: Any) -> None:
    model = make_stock()
    with pytest.raises(ValueError, match="cuda_graphs=True: the model is on cpu, not on a GPU; use cuda_graphs=False"):
        Engine(model, cuda_graphs=True)
    assert Engine(model, cuda_graphs="auto").cache.scratch_row is None
    layout = Engine(model).cache.layout.__class__(2, 2, 16, torch.float32, torch.device("cuda"))
    assert why_not_recorded(layout, None, model.config) is None
    half = Budget(ratio=2)
    for policy in (policies.Quest, policies.OmniKV):
        assert f"{policy.__name__} asks the host" in str(why_not_recorded(layout, policy(budget=half), model.config))
    assert why_not_recorded(layout, policies.H2O(budget=half), model.config) is None
    model.config.rope_parameters = {"rope_type": "dynamic"}
    assert "by position" in str(why_not_recorded(layout, None, model.config))
