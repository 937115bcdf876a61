"""Requests that go on from caches which the server has loaded."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import TEXT_VOCAB_SIZE, build_stock, mixed_gates

from dmc import Engine, SamplingParams, policies, retrofit
from dmc.budget import Budget
from dmc.serving.worker import Worker

CORPUS = "".join(f"line {i} <b>é</b>\n" for i in range(12))
QUESTIONS = ["line 3", " <b>", "x"]
GREEDY = SamplingParams(max_new_tokens=9, temperature=0)


@pytest.fixture
def expected_and_served(make_server: Callable[..., Any], text_tokenizer: Any, tmp_path: Path) -> Any:
    """Return what forks of a session answer by served name, and a server that has loaded the session."""
    stock, other = (build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512) for _ in range(2))
    methods = {"own": (retrofit(other, mixed_gates()), None), "h2o": (stock, policies.H2O(budget=Budget(ratio=3)))}
    expected: dict[str, list[str]] = {}
    engines, caches = {}, {}
    for name, (model, policy) in methods.items():
        engine = Engine(model, text_tokenizer, policy)
        with engine.session() as session:
            session.feed(CORPUS)
            engine.save(session, tmp_path / name)
            expected[name] = [session.fork().generate(question, GREEDY).text or "" for question in QUESTIONS]
        engines[name] = Engine(model, text_tokenizer, policy, max_batch_size=2, prefix_cache=True)
        caches[name] = {"corpus": str(tmp_path / name)}
    engines["bare"] = Engine(stock, text_tokenizer)
    return expected, make_server(engines, caches=caches)


def completion(question: str, **more: Any) -> dict[str, Any]:
    extra = {"cache_id": "corpus", **more.pop("extra_body", {})}
    return {"prompt": question, "max_tokens": 9, "temperature": 0, "extra_body": extra, **more}


def test_requests_go_on_from_a_cache_each_by_itself(expected_and_served: Any, text_tokenizer: Any) -> None:
    (expected, served), num_carried = expected_and_served, len(text_tokenizer(CORPUS)["input_ids"])

    async def ask(name: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            asked = [client.completions.create(model=name, **completion(text)) for text in QUESTIONS * 2]
            return await asyncio.gather(*asked)

    for name, texts in expected.items():
        engine = served.worker.engines[name]
        held = engine.blocks_in_use
        for answer, question, text in zip(asyncio.run(ask(name)), QUESTIONS * 2, texts * 2, strict=True):
            assert answer.choices[0].text == text
            num_new = len(text_tokenizer(question, add_special_tokens=False)["input_ids"])
            assert answer.usage.prompt_tokens == num_carried + num_new
            assert answer.usage.prompt_tokens_details.cached_tokens == num_carried
        stream = served.client().completions.create(model=name, stream=True, **completion(QUESTIONS[0]))
        assert "".join(piece.choices[0].text for piece in stream) == texts[0]
        engine._scheduler.reset()  # as a pass that fails does; the cache is read again
        assert served.client().completions.create(model=name, **completion("x")).choices[0].text == texts[2]
        assert engine.blocks_in_use == held
        shutil.rmtree(served.worker.caches[name]["corpus"]._folder)
        engine._scheduler.reset()  # it cannot be read: its tokens are computed
        answer = served.client().completions.create(model=name, **completion("x"))
        assert answer.choices[0].text == texts[2] and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert not any(served.worker.num_unfinished.values())


def test_a_chat_follows_the_cache(expected_and_served: Any, text_tokenizer: Any) -> None:
    _, served = expected_and_served
    messages: list[Any] = [{"role": "user", "content": "line 3?"}]
    written = text_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert written[0] != text_tokenizer.bos_token_id
    engine = Engine(served.worker.engines["h2o"].model, text_tokenizer, policies.H2O(budget=Budget(ratio=3)))
    with engine.session() as session:
        session.feed(CORPUS)
        expected = session.generate(written, GREEDY).text
    request: Any = {"model": "h2o", "messages": messages, "max_completion_tokens": 9, "temperature": 0}
    answer = served.client().chat.completions.create(**request, extra_body={"cache_id": "corpus"})
    assert answer.choices[0].message.content == expected


def test_what_cannot_go_on_from_a_cache_is_refused(expected_and_served: Any) -> None:
    _, served = expected_and_served

    def refusal(**body: Any) -> tuple[int, str, str, str | None]:
        request = {"model": "own", "prompt": "x", "cache_id": "corpus", "max_tokens": 2, **body}
        answer = httpx.post(f"{served.url}/v1/completions", json=request)
        error = answer.json()["error"]
        return answer.status_code, error["message"], error["param"], error["code"]

    unknown = "'own' has no cache 'other': expected one of corpus"
    assert refusal(cache_id="other") == (404, unknown, "cache_id", "cache_not_found")
    bare = "'bare' has no cache 'corpus': none was loaded, see caches="
    assert refusal(model="bare") == (404, bare, "cache_id", "cache_not_found")
    assert refusal(n=2) == (400, "n=2: with a cache_id expected 1", "n", None)
    assert refusal(question_tokens=1)[:1] == (400,)
    assert refusal(cache_id=3)[:1] == (400,)
    status, message, *_ = refusal(max_tokens=512)
    assert status == 400 and "tokens of the prompt and 512 to generate" in message
    models = json.loads(httpx.get(f"{served.url}/v1/models").text)["data"]
    tokens = served.worker.caches["own"]["corpus"].num_tokens
    assert {about["id"]: about["caches"] for about in models} == {
        "own": {"corpus": tokens},
        "h2o": {"corpus": tokens},
        "bare": {},
    }


def test_a_cache_without_room_is_named_when_the_server_starts(tmp_path: Path) -> None:
    model = build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512)
    engine = Engine(model)
    with engine.session() as session:
        session.feed(list(range(3, 103)))
        engine.save(session, tmp_path / "long")
    small = Engine(model, memory=engine.cache.block_bytes * 8)
    with pytest.raises(ValueError, match=r"the 100 tokens of .*long do not fit into what is left of memory=: give"):
        Worker({"own": small}, 4, caches={"own": {"corpus": str(tmp_path / "long")}})


def test_carried_caches_leave_less_room_for_plain_requests_than_for_those_that_go_on_from_them(tmp_path: Path) -> None:
    model = build_stock(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512)
    text = list(range(3, 103))
    whole = Engine(model)
    heads = whole.cache.layout.num_layers * whole.cache.layout.num_kv_heads
    with whole.session() as session:
        session.feed(text)
        whole.save(session, tmp_path / "corpus")
    engine = Engine(model, memory=whole.cache.block_bytes * heads * (7 + 3))  # three blocks of each head are left
    worker = Worker({"own": engine}, 4, caches={"own": {"corpus": str(tmp_path / "corpus")}})
    plain, carried = worker.max_model_len("own"), worker.max_model_len("own", "corpus")
    assert (plain, carried) == (48, 132)
    frozen = worker.caches["own"]["corpus"]
    for prompt, longest, session in ((text[:40], plain, None), (text[:20], carried - len(text), frozen.session())):
        params = SamplingParams(max_new_tokens=longest - len(prompt), temperature=0, ignore_eos=True)
        request = engine.submit(prompt, params, session)
        engine.run([request])
        assert request.generation is not None and request.generation.finish_reason == "length"
        assert request.sequence.num_preemptions == 0 and not frozen._frozen.is_lost
    assert worker.max_model_len("nobody") == 0
