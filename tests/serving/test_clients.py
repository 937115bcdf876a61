"""The real client of OpenAI, on a real socket: it gets what the engine generates."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dmc import Engine, SamplingParams
from dmc.serving.worker import Job

NAMES = ("full", "own", "h2o", "snapkv", "quest")
PROMPT = "line 3 <b>é & xxx</b>\nline 4 <b>"
CHAT: list[Any] = [
    {"role": "system", "content": "xx"},
    {"role": "user", "content": [{"type": "text", "text": "line 5"}]},
]
CHAT_TEXT = "<system>xx\n<user>line 5\n<assistant>"


def alone(served: Any, name: str, prompt: str, **params: Any) -> Any:
    """Generate on a separate engine, while the server's is idle."""
    served_engine = served.worker.engines[name]
    engine = Engine(served_engine.model, served_engine.tokenizer, served_engine.policy)
    return engine.generate([prompt], SamplingParams(**{"max_new_tokens": 12, "temperature": 0, **params}))[0]


def dmc_stats(usage: Any) -> dict[str, Any]:
    return usage.model_extra["x-dmc-stats"]


@pytest.mark.parametrize("name", NAMES)
def test_completions_are_what_the_engine_generates(served: Any, name: str) -> None:
    expected = alone(served, name, PROMPT)
    client = served.client()
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len(choice.logprobs.tokens) == 12
    tokens = served.worker.engines[name].tokenizer(PROMPT)["input_ids"]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(tokens), 12, len(tokens) + 12)
    stats = dmc_stats(usage)
    assert stats["achieved_ratio"] == pytest.approx(expected.stats.achieved_ratio, abs=1e-3)
    # A row's block tables are as wide as the longest request before it needed, of another test perhaps.
    cache = served.worker.engines[name].cache
    tables = sum(cache.layer(index).block_tables[0].nbytes for index in range(cache.layout.num_layers))
    assert 0 <= stats["bytes_used"] - expected.stats.bytes_used < tables
    assert stats["slots"] == int(expected.stats.slots.sum())
    Completion.model_validate(answer.model_dump())

    pieces = list(
        client.completions.create(
            model=name, prompt=PROMPT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices] == [None] * 11 + ["length"]
    assert pieces[-1].usage.completion_tokens == 12
    assert not pieces[-1].choices
    assert 0 <= dmc_stats(pieces[-1].usage)["bytes_used"] - expected.stats.bytes_used < tables


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_what_the_engine_generates_after_the_template(served: Any, name: str) -> None:
    expected = alone(served, name, CHAT_TEXT)
    client = served.client()
    request: Any = {"model": name, "messages": CHAT, "max_completion_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**request, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, "length")
    ChatCompletion.model_validate(answer.model_dump())
    for token, logprob in zip(choice.logprobs.content, expected.logprobs, strict=True):
        assert token.logprob == pytest.approx(logprob, abs=1e-4)
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        assert token.top_logprobs[0].logprob == token.logprob  # greedy
        assert len(token.top_logprobs) == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = list(client.chat.completions.create(**request, stream=True, stream_options=options))
    for piece in pieces:
        ChatCompletionChunk.model_validate(piece.model_dump())
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected.text
    assert pieces[-1].usage.completion_tokens == 12
    last = dmc_stats(pieces[-1].usage)
    assert last["slots_by_head"] == expected.stats.slots.tolist()
    assert last["tokens_seen"] == expected.stats.tokens_seen
    live = [dmc_stats(piece.usage)["slots_by_head"] for piece in pieces[1:-1]]
    assert len(live[0]) == 2 and len(live[0][0]) == 2


def test_asynchronous_clients_share_the_engine(served: Any) -> None:
    expected = [alone(served, "own", f"line {index}", temperature=1.0, seed=index).text for index in range(12)]

    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        request: Any = {"model": "own", "prompt": f"line {index}", "max_tokens": 12, "seed": index}
        if index % 2:
            return (await client.completions.create(**request)).choices[0].text
        return "".join(
            [piece.choices[0].text async for piece in await client.completions.create(**request, stream=True)]
        )

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client, index) for index in range(12))))

    assert asyncio.run(ask_all()) == expected
    served.wait_until_idle()


def test_several_prompts_and_continuations_stand_in_order(served: Any) -> None:
    prompts = ["line 1", "line 2 <b>"]
    expected = [alone(served, "full", prompt, temperature=0.9, seed=3, n=3) for prompt in prompts]
    texts = [generation.text for best in expected for generation in (best, *best.alternatives)]
    client = served.client()
    request: Any = {"model": "full", "prompt": prompts, "max_tokens": 12, "temperature": 0.9, "seed": 3, "n": 3}
    answer = client.completions.create(**request)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [*range(6)]
    assert answer.usage.completion_tokens == 6 * 12
    streamed = [""] * 6
    for piece in client.completions.create(**request, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == texts
    tokens = served.worker.engines["full"].tokenizer(prompts)["input_ids"]
    assert [choice.text for choice in client.completions.create(**{**request, "prompt": tokens}).choices] == texts


def test_stops_penalties_and_biases_are_the_engines(served: Any) -> None:
    client, request = served.client(), {"model": "full", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    free = alone(served, "full", PROMPT)
    stop = free.text[5:7]
    choice = client.completions.create(**request, stop=["never", stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (free.text[: free.text.find(stop)], "stop")
    pieces = list(client.completions.create(**request, stop=stop, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text
    assert pieces[-1].choices[0].finish_reason == "stop"
    token = free.token_ids[0]
    assert client.completions.create(**request, logit_bias={str(token): -100}).choices[0].text != free.text
    always = client.completions.create(**request, logit_bias={str(token): 100})
    assert always.choices[0].text == served.worker.engines["full"].tokenizer.decode([token] * 12)
    penalized = client.completions.create(**request, logit_bias={str(token): 4}, frequency_penalty=2.0)
    options = {"logit_bias": {token: 4}, "frequency_penalty": 2.0}
    assert penalized.choices[0].text == alone(served, "full", PROMPT, **options).text != always.choices[0].text
    once = client.completions.create(**request, logit_bias={str(token): 4}, presence_penalty=2.0)
    options = {"logit_bias": {token: 4}, "presence_penalty": 2.0}
    assert once.choices[0].text == alone(served, "full", PROMPT, **options).text != always.choices[0].text
    extra = {"repetition_penalty": 1.3, "top_k": 3, "ignore_eos": True}
    expected = alone(served, "full", PROMPT, repetition_penalty=1.3)
    assert client.completions.create(**request, extra_body=extra).choices[0].text == expected.text
    assert (
        client.completions.create(**request, user="me", best_of=1, suffix=None, extra_body={"metadata": {}})
        .choices[0]
        .text
        == free.text
    )


@pytest.mark.parametrize("name", ["full", "own"])
def test_an_echoed_prompt_has_log_probabilities(served: Any, name: str) -> None:
    engine = served.worker.engines[name]
    tokens = engine.tokenizer(PROMPT)["input_ids"]
    expected = Engine(engine.model).score([tokens[:1]], [tokens[1:]])[0]
    given = [float(row[token]) for row, token in zip(expected, tokens[1:], strict=True)]
    client, request = served.client(), {"model": name, "prompt": PROMPT, "temperature": 0, "echo": True}
    choice = client.completions.create(**request, max_tokens=1, logprobs=1).choices[0]
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:-1] == pytest.approx(given, abs=1e-4)
    assert [max(top.values()) for top in logprobs.top_logprobs[1:-1]] == pytest.approx(
        expected.amax(1).tolist(), abs=1e-4
    )
    shown = ["\ufffd" if token.startswith("bytes:") else token for token in logprobs.tokens]  # what is no character
    assert "".join(shown) == choice.text
    assert [choice.text[at:][: len(text)] for at, text in zip(logprobs.text_offset, shown, strict=True)] == shown
    pieces = list(client.completions.create(**request, max_tokens=3, logprobs=1, stream=True))
    streamed = [logprob for piece in pieces for logprob in piece.choices[0].logprobs.token_logprobs]
    assert streamed[1 : len(tokens)] == pytest.approx(given, abs=1e-4)


def test_question_tokens_mean_nothing_without_a_policy(served: Any) -> None:
    request: Any = {"model": "full", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    expected, given = (
        served.client().completions.create(**request, extra_body={"question_tokens": number}).choices[0].logprobs
        for number in (0, 3)
    )
    assert given.token_logprobs[1:] == pytest.approx(expected.token_logprobs[1:], abs=1e-4)
    assert given.tokens == expected.tokens


@pytest.mark.parametrize(("name", "turn"), [("full", 2), ("own", 3)])
def test_conversations_hit_the_prefix_cache(served: Any, name: str, turn: int) -> None:
    """Gates: where prompts have been seen to part, or where the answer is read as it was written."""
    client, messages = served.client(), [{"role": "user", "content": name + "x" * 300}]
    for number in range(1, turn + 1):
        request: Any = {"model": name, "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = client.chat.completions.create(**request)
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages) + "<assistant>"
        assert answer.choices[0].message.content == alone(served, name, text, max_new_tokens=8).text
        reused = answer.usage.prompt_tokens_details.cached_tokens
        assert reused >= 128 if number == turn else reused < 128 or number > 1
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "b"},
        ]


def test_models_tokens_health_and_metrics(served: Any) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == list(served.worker.engines)
    assert client.models.retrieve("own").id == "own"
    with httpx.Client(base_url=served.url) as web:
        tokens = served.worker.engines["full"].tokenizer(PROMPT)["input_ids"]
        response = web.post("/tokenize", json={"prompt": PROMPT, "model": "full"}).json()
        assert (response["tokens"], response["count"], response["max_model_len"]) == (tokens, len(tokens), 512)
        assert web.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": PROMPT}
        assert web.get("/health").json() == {"status": "ok"}
        client.completions.create(model="h2o", prompt=PROMPT, max_tokens=5)
        served.wait_until_idle()
        text = web.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['dmc_generated_tokens_total{model="h2o"}']) >= 5
    assert float(lines['dmc_requests_total{finish_reason="length",model="h2o"}']) >= 1
    assert float(lines['dmc_achieved_ratio_sum{model="h2o"}']) > 1
    for name in (
        "dmc_time_to_first_token_seconds_count",
        "dmc_pool_blocks",
        "dmc_requests_waiting",
        "dmc_preemptions_total",
    ):
        assert name + '{model="h2o"}' in lines


def test_a_client_that_goes_away_frees_its_blocks(served: Any) -> None:
    request = {"model": "full", "prompt": "line", "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    before = float(_counter(served, "dmc_generated_tokens_total"))
    with (
        httpx.Client(base_url=served.url) as web,
        web.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer,
    ):
        next(answer.iter_lines())
    served.wait_until_idle()
    with httpx.Client(base_url=served.url, timeout=0.3) as web, pytest.raises(httpx.ReadTimeout):
        web.post("/v1/completions", json={**request, "n": 8})
    served.wait_until_idle()
    assert float(_counter(served, "dmc_generated_tokens_total")) - before < 9 * 500


def _counter(served: Any, name: str, model: str = "full") -> str:
    text = httpx.get(f"{served.url}/metrics").text
    return next((line.split()[-1] for line in text.splitlines() if line.startswith(f'{name}{{model="{model}"')), "0")


def test_gauges_are_right_when_nothing_runs_any_more(served: Any) -> None:
    for _ in range(3):
        served.client().completions.create(model="full", prompt="line", max_tokens=2)
        served.wait_until_idle()
        end = time.monotonic() + 10
        while any(float(_counter(served, name)) for name in ("dmc_requests_running", "dmc_pool_blocks_in_use")):
            assert time.monotonic() < end


def test_a_full_queue_answers_429(make_server: Any, served: Any) -> None:
    served_engine = served.worker.engines["full"]
    busy = make_server({"one": Engine(served_engine.model, served_engine.tokenizer, max_batch_size=1)}, max_waiting=1)
    step, gate = busy.worker.engines["one"].step, threading.Event()
    busy.worker.engines["one"].step = lambda: gate.wait(20) and step()
    request: Any = {"model": "one", "prompt": "line", "max_tokens": 2}
    client, found = busy.client(timeout=20), []
    threads = [threading.Thread(target=lambda: found.append(client.completions.create(**request))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while busy.worker.num_unfinished["one"] < 2:
        time.sleep(0.01)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**request)
    assert caught.value.response.headers["retry-after"] == "1"
    gate.set()
    for thread in threads:
        thread.join(20)
    assert len(found) == 2
    busy.wait_until_idle()


class OwnedByOne(dict):
    """What only one thread may change, for it iterates over it."""

    def __init__(self, owner: threading.Thread) -> None:
        self.owner = owner

    def __setitem__(self, key: Any, value: Any) -> None:
        assert threading.current_thread() is self.owner
        super().__setitem__(key, value)


def test_jobs_come_while_the_engines_step_and_are_answered_when_these_stop(make_server: Any, served: Any) -> None:
    served_engine = served.worker.engines["full"]
    server = make_server({"one": Engine(served_engine.model, served_engine.tokenizer)})
    worker = server.worker
    worker._jobs = OwnedByOne(worker._thread)
    request: Any = {"model": "one", "prompt": "line", "max_tokens": 2}
    assert server.client().completions.create(**request).usage.completion_tokens == 2

    async def submit() -> list[Any]:
        news: asyncio.Queue[Any] = asyncio.Queue()
        jobs = [Job("one", [1, 2], SamplingParams(), index, news, asyncio.get_running_loop()) for index in range(2)]

        def die(name: str, engine: Engine) -> None:
            worker.submit(jobs[1:])  # at the last moment
            raise SystemExit("secret reason")

        worker._step = die
        worker.submit(jobs[:1])
        return [(await asyncio.wait_for(news.get(), 20))[1] for _ in jobs]

    assert [error.message for error in asyncio.run(submit())] == ["the engines have stopped"] * 2
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().completions.create(**request)
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
    assert httpx.get(f"{server.url}/health").status_code == 503


def test_a_pass_that_fails_ends_the_request_at_fault_and_streams_beside_it_go_on(make_server: Any, served: Any) -> None:
    served_engine = served.worker.engines["full"]
    engine = Engine(served_engine.model, served_engine.tokenizer)
    server = make_server({"one": engine})
    bad = engine.tokenizer("&")["input_ids"][0]
    forward = engine._runner.forward

    def refuse(segments: Any) -> Any:
        if any(bad in segment.tokens for segment in segments):
            raise RuntimeError("secret path")
        return forward(segments)

    engine._runner.forward = refuse
    client = server.client()
    good: Any = {"model": "one", "prompt": "line 4", "max_tokens": 30, "temperature": 0, "logit_bias": {str(bad): -100}}
    text = client.completions.create(**good).choices[0].text
    stream = iter(client.completions.create(**good, stream=True))
    begun = next(stream).choices[0].text
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**{**good, "prompt": "a & b"})
    assert caught.value.body["type"] == "server_error"
    assert begun + "".join(piece.choices[0].text for piece in stream) == text
    assert client.completions.create(**good).choices[0].text == text
    server.wait_until_idle()


def test_requests_need_a_key(make_server: Any, served: Any) -> None:
    server = make_server(
        {"own": Engine(served.worker.engines["own"].model, served.worker.engines["own"].tokenizer)}, keys=("one", "zwö")
    )
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.client(api_key="one").models.list().data[0].id == "own"
    for wrong in ("onee", "on", "One", "none"):
        answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {wrong}".encode()})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer zwö".encode()}).status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == 401


def test_prompts_are_logged_only_on_request(make_server: Any, served: Any, caplog: Any) -> None:
    request = {"model": "own", "prompt": "line of a secret", "max_tokens": 1}
    for limits, is_logged in (({}, False), ({"log_prompts": True}, True)):
        server = make_server({"own": served.worker.engines["own"]}, **limits)
        server.client().completions.create(**request)
        assert ("line of a secret" in caplog.text) == is_logged


def test_events_are_json(served: Any) -> None:
    request = {"model": "own", "prompt": "line", "max_tokens": 3, "stream": True}
    lines = httpx.post(f"{served.url}/v1/completions", json=request).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert [json.loads(line.removeprefix("data: "))["object"] for line in lines[:-2]] == ["text_completion"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_no_text_cuts_an_event_in_two(served: Any, stream: bool) -> None:
    text = "one\u2028two\u2029three\x85four\x0bfive\x1csix\r\nend"
    body = {"model": "full", "prompt": text, "echo": True, "stream": stream, "max_tokens": 2}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    answers = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(answers) == (3 if stream else 1)
    assert answers[0]["choices"][0]["text"].startswith(text)
