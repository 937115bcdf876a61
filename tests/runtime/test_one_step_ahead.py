"""A step that is launched before the last one is read changes no token and no figure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dmc import Engine, SamplingParams
from dmc.runtime.runner import Runner
from dmc.runtime.slow_pool import PendingCopy

GATES: dict[str, dict | None] = {"full cache": None, "merge": {}, "drop, delay 4": {"action": "drop", "delay": 4}}
FIGURES = ("tokens_seen", "achieved_ratio", "mean_tokens_seen")
OF_BYTES = (
    "bytes_used",
    "bytes_allocated",
    "bytes_fast",
    "mean_bytes_used",
    "mean_bytes_allocated",
    "peak_bytes_allocated",
)


@pytest.fixture
def made(make_stock: Any, make_compressed: Any) -> Any:
    """Return what makes a model of `GATES`."""
    return lambda gates: make_stock() if GATES[gates] is None else make_compressed(gates=GATES[gates])


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List launches and reads of steps as they happen."""
    seen: list[str] = []
    launch, read = Runner.launch, PendingCopy.on_host
    monkeypatch.setattr(Runner, "launch", lambda runner, batch: seen.append("launch") or launch(runner, batch))
    monkeypatch.setattr(PendingCopy, "on_host", lambda copy: seen.append("read") or read(copy))
    return seen


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare two generations, what they held included."""
    assert (ours.token_ids, ours.finish_reason, ours.text) == (theirs.token_ids, theirs.finish_reason, theirs.text)
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert torch.equal(ours.stats.slots, theirs.stats.slots)
    torch.testing.assert_close(ours.stats.mean_slots, theirs.stats.mean_slots)
    for name in FIGURES:
        assert getattr(ours.stats, name) == getattr(theirs.stats, name), name
    wider = {getattr(ours.stats, name) - getattr(theirs.stats, name) for name in OF_BYTES}
    assert max(wider) - min(wider) < 1e-6  # tables of recorded steps have their full width
    for mine, other in zip(ours.alternatives, theirs.alternatives, strict=True):
        assert_same(mine, other)


def arriving(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Generate, each prompt some steps after the one before."""
    requests = []
    for prompt, settings in zip(prompts, params, strict=True):
        requests.append(engine.submit(prompt, settings))
        for _ in range(9):
            engine.step()
    engine.run(requests)
    assert engine.blocks_in_use == 0
    return [request.generation for request in requests]


def test_the_next_step_is_launched_before_the_last_is_read(
    make_compressed: Any, make_prompts: Any, make_recording: Any, order: list[str]
) -> None:
    engine, _ = make_recording(make_compressed(), memory=2**22)
    params = SamplingParams(max_new_tokens=10, temperature=0, ignore_eos=True)
    engine.generate(make_prompts(5, 9), params)
    assert order == ["launch", *["launch", "read"] * 8, "read"]  # the first token is the prompts' pass's
    order.clear()
    engine.generate(make_prompts(5), SamplingParams(max_new_tokens=5, temperature=0, stop_token_ids=tuple(range(9))))
    assert order == ["launch", "read"] * (len(order) // 2)  # more ends than the device knows


@pytest.mark.parametrize(
    ("gates", "options"),
    [
        ("full cache", {"memory": 60 * 2048}),
        ("merge", {"prefix_cache": True}),
        ("drop, delay 4", {}),
        ("drop, delay 4", {"memory": 60 * 2048}),
    ],
    ids=str,
)
def test_stops_arrivals_and_preemptions_give_the_eager_tokens_and_figures(
    gates: str, options: dict, made: Any, make_prompts: Any, make_recording: Any, order: list[str]
) -> None:
    prompts = make_prompts(5, 70, 20, 33, 8)
    prompts.append(prompts[1][:64] + prompts[2])
    params = [
        SamplingParams(max_new_tokens=40, temperature=0.9, seed=1, stop_token_ids=(3, 9, 27)),
        SamplingParams(max_new_tokens=60, seed=2, top_k=30, n=2, stop_token_ids=(5, 6)),
        SamplingParams(max_new_tokens=20, temperature=0),
        SamplingParams(max_new_tokens=50, seed=4, stop_token_ids=tuple(range(40, 44)), top_logprobs=2),
        SamplingParams(max_new_tokens=30, seed=5, top_p=0.9, stop_token_ids=(1, 2)),
        SamplingParams(max_new_tokens=30, seed=6, stop_token_ids=(7,)),
    ]
    model = made(gates)
    expected = arriving(Engine(model, kernels="reference", max_batch_size=4, **options), prompts, params)
    engine, record = make_recording(model, max_batch_size=4, **options)
    found = arriving(engine, prompts, params)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    assert {generation.finish_reason for generation in found} == {"stop", "length"}
    assert record.num_replayed and "launch launch read" in " ".join(order)


def test_tokens_that_stay_open_are_chosen_among_all(
    make_stock: Any, make_prompts: Any, make_recording: Any, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    for place in ("sampling", "runner"):
        monkeypatch.setattr(f"dmc.runtime.{place}.CANDIDATES", 16)
    params = [SamplingParams(max_new_tokens=30, seed=seed, top_p=0.6, stop_token_ids=(4,)) for seed in range(3)]
    model, prompts = make_stock(), make_prompts(5, 9, 20)
    expected = arriving(Engine(model, kernels="reference"), prompts, params)
    engine, _ = make_recording(model)
    for ours, theirs in zip(arriving(engine, prompts, params), expected, strict=True):
        assert_same(ours, theirs)
    assert "launch launch read" in " ".join(order)


@pytest.mark.parametrize("gates", GATES)
def test_sessions_go_on_from_where_their_turn_has_stopped(
    gates: str, made: Any, make_prompts: Any, make_recording: Any
) -> None:
    model, (first, second, other) = made(gates), make_prompts(40, 6, 11)
    stops = SamplingParams(max_new_tokens=60, seed=1, stop_token_ids=tuple(range(8)))

    def turns(engine: Engine) -> list[Any]:
        beside = engine.submit(other, SamplingParams(max_new_tokens=150, temperature=0, ignore_eos=True))
        with engine.session() as session:
            found = [session.generate(first, stops)]
            with session.fork() as fork:
                found += [fork.generate(second, stops), session.generate(second, stops)]
        engine.abort(beside)
        assert engine.blocks_in_use == 0
        return [*found, beside.generation.token_ids]

    eager = turns(Engine(model, kernels="reference"))
    found = turns(make_recording(model)[0])
    assert eager[0].finish_reason == "stop"
    for ours, theirs in zip(found[:-1], eager[:-1], strict=True):
        assert_same(ours, theirs)
    length = min(len(found[-1]), len(eager[-1]))
    assert found[-1][:length] == eager[-1][:length] and length > 12


@pytest.mark.parametrize("gates", GATES)
def test_an_abort_between_two_steps_measures_what_its_tokens_hold(
    gates: str, made: Any, make_prompts: Any, make_recording: Any
) -> None:
    model, prompts = made(gates), make_prompts(30, 9)
    engine, _ = make_recording(model, memory=2**22)
    params = SamplingParams(max_new_tokens=45, seed=3, ignore_eos=True)
    gone, stays = (engine.submit(prompt, params) for prompt in prompts)
    events = [event for _ in range(20) for event in engine.step()]
    assert engine.stats(gone).tokens_seen == 30 + len(gone.logprobs) - 1
    engine.abort(gone)
    while stays.generation is None:
        events += engine.step()
    for request, prompt in ((gone, prompts[0]), (stays, prompts[1])):
        tokens = request.generation.token_ids
        assert [event.token_id for event in events if event.request is request] == tokens
        short = SamplingParams(max_new_tokens=len(tokens), seed=3, ignore_eos=True)
        (alone,) = Engine(model, kernels="reference").generate([prompt], short)
        assert alone.token_ids == tokens
        assert_same(dataclasses.replace(request.generation, finish_reason="length"), alone)
    assert engine.blocks_in_use == 0


def test_logits_that_are_no_numbers_end_their_request_alone(
    make_stock: Any, make_prompts: Any, make_recording: Any
) -> None:
    model, prompts = make_stock(), make_prompts(5, 9)
    params = [SamplingParams(max_new_tokens=60, seed=seed, ignore_eos=True) for seed in range(2)]
    first, second = Engine(model, kernels="reference").generate(prompts, params)
    (poison, *_) = (token for token in first.token_ids[8:] if token not in (*second.token_ids, *prompts[1]))
    model.get_input_embeddings().weight.data[poison] = torch.nan
    engine, _ = make_recording(model)
    failing, other = (engine.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True))
    while other.generation is None:
        engine.step()
    assert other.generation.token_ids == second.token_ids
    assert isinstance(failing.error, ArithmeticError)
    assert failing.generation.token_ids == first.token_ids[: first.token_ids.index(poison) + 1]
    assert engine.blocks_in_use == 0
