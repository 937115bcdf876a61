"""What is wrong is told in OpenAI's form, once, and the server goes on."""

from __future__ import annotations

import json
import socket
import time
import tracemalloc
from typing import Any

import httpx
import pytest
from openai.types import chat, completion_create_params

from dmc.serving.requests import BODIES, METADATA, APIError, read

COMPLETION = {"model": "own", "prompt": "line 1", "max_tokens": 2}
CHAT = {"model": "own", "messages": [{"role": "user", "content": "line 1"}], "max_tokens": 2}
FIELDS: dict[str, list[tuple[int, Any]]] = {
    "model": [(400, 3), (404, "gpt-4"), (404, ""), (404, "m" * 10000), (400, None)],
    "prompt": [
        (400, None),
        (400, ""),
        (400, []),
        (400, [[]]),
        (400, [1.5]),
        (400, [83000]),
        (400, [-1]),
        (400, {}),
        (400, True),
    ],
    "max_tokens": [(400, -1), (400, "many"), (400, 1.5), (400, 10**6), (400, 10**30), (400, True), (400, [])],
    "temperature": [(400, -0.1), (400, "hot"), (400, True), (400, [])],
    "top_p": [(400, 0), (400, 1.1)],
    "n": [(400, 0), (400, 33), (400, 10**12), (400, "two"), (400, 1.5)],
    "stop": [(400, [""]), (400, ["a"] * 33), (400, ["a" * 1001]), (400, [3]), (400, {})],
    "seed": [(400, -1), (400, 2**64), (400, "x"), (400, 1.5)],
    "stream": [(400, "yes"), (400, 1)],
    "stream_options": [(400, True), (422, {"include_everything": True})],
    "logprobs": [(400, 21), (400, -1), (400, "all")],
    "presence_penalty": [(400, 3), (400, "x")],
    "frequency_penalty": [(400, -3), (400, "x")],
    "logit_bias": [
        (400, {"x": 1}),
        (400, {"99999": 1}),
        (400, {"1": 101}),
        (400, {"-1": 1}),
        (400, [1]),
        (400, {"1": "x"}),
        (400, {"9" * 5000: 1}),
        (400, {"1": True}),
    ],
    "best_of": [(422, 3)],
    "suffix": [(422, "end")],
    "echo": [(400, "yes")],
    "min_p": [(400, 2)],
    "stop_token_ids": [(400, [10**6]), (400, ["x"]), (400, [-1])],
    "nonsense": [(422, 1), (422, {})],
    "n" * 5000: [(422, 1)],
}
CHATS: dict[str, list[tuple[int, Any]]] = {
    "messages": [
        *((400, None), (400, []), (400, "hi"), (400, [3]), (400, [{}]), (400, [{"role": "user"}])),
        *((400, [{"role": "king", "content": "x"}]), (400, [{"role": "user", "content": 3}])),
        (400, [{"role": "tool", "content": "x"}]),  # which the template refuses
        (422, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        (422, [{"role": "user", "content": "x", "tool_calls": []}]),
        (400, [{"role": "user", "content": "x" * 50000}]),
    ],
    "tools": [(422, [{"type": "function", "function": {"name": "f"}}])],
    "response_format": [(422, {"type": "json_object"})],
    "logprobs": [(400, 3)],
    "top_logprobs": [(400, 21)],
    "modalities": [(422, ["audio"])],
    "audio": [(422, {"voice": "x"})],
    "store": [(422, True)],
}
CASES = [
    *(("completions", COMPLETION, name, *each) for name, cases in FIELDS.items() for each in cases),
    *(("chat/completions", CHAT, name, *each) for name, cases in CHATS.items() for each in cases),
]


def check(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    message = body["error"]["message"]
    assert message and "\n" not in message and "Traceback" not in message and len(message) < 1200
    return body["error"]


@pytest.mark.parametrize(("route", "body", "name", "status", "value"), CASES, ids=lambda each: repr(each)[:30])
def test_a_wrong_field_is_named(served: Any, route: str, body: dict, name: str, status: int, value: Any) -> None:
    with httpx.Client(base_url=served.url) as web:
        error = check(web.post(f"/v1/{route}", json={**body, name: value}), status)
        assert (error["param"] or "").split(".")[0] in (name[:100], "prompt" if name == "max_tokens" else name[:100])
        streamed = check(web.post(f"/v1/{route}", json={**body, "stream": True, name: value}), status)
    assert streamed["message"] == error["message"]


@pytest.mark.parametrize(
    ("path", "body", "published"),
    [
        ("/v1/completions", COMPLETION, completion_create_params),
        ("/v1/chat/completions", CHAT, chat.completion_create_params),
    ],
)
def test_every_published_field_is_served_or_refused_by_name(path: str, body: dict, published: Any) -> None:
    known = {*published.CompletionCreateParamsBase.__annotations__, "stream"}
    served = known & BODIES[path][1]
    assert len(served) >= 15
    for name in sorted(known - served - METADATA):
        read(path, json.dumps({**body, name: None}).encode())
        with pytest.raises(APIError, match=f"{name}=.* is not served here") as caught:
            read(path, json.dumps({**body, name: {"x": 1}}).encode())
        assert (caught.value.status, caught.value.param) == (422, name)


NO_REQUESTS = {
    b"": 400,
    b"{": 400,
    b"null": 400,
    b"[]": 400,
    b'{"model": "own", "prompt": "a", "\\ud800": 1}': 400,
    b"3": 400,
    b'"text"': 400,
    b"\xff\xfe": 400,
    b'{"model": "own", "prompt": "\xff"}': 400,
    b'{"model": "own", "prompt": "\\ud800"}': 400,
    b'{"model": "own", "prompt": "x", "temperature": NaN}': 400,
    b'{"model": "own", "prompt": "x", "temperature": 1e999}': 400,
    b'{"model": "own", "prompt": "x", "seed": ' + b"9" * 5000 + b"}": 400,
    b"[" * 100000: 400,
    b'{"model": ' + b"[" * 100000 + b"]" * 100000 + b"}": 400,
    b'{"model": "own", "prompt": "' + b"x" * 10_000_000 + b'"}': 413,
}


@pytest.mark.parametrize("body", NO_REQUESTS, ids=lambda each: repr(each[:40]))
def test_a_body_that_is_no_request_is_refused(served: Any, body: bytes) -> None:
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{served.url}{route}", content=body, headers=headers)
        if b"prompt" in body and NO_REQUESTS[body] != 413 and route != "/v1/completions":
            assert answer.status_code < 500  # another kind of body there
        else:
            check(answer, NO_REQUESTS[body])


def test_wrong_kinds_routes_and_methods_are_told(served: Any) -> None:
    body = json.dumps(COMPLETION)
    with httpx.Client(base_url=served.url) as web:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            check(web.post("/v1/completions", content=body, headers={"content-type": kind}), 415)
        check(web.get("/v1/completions"), 405)
        check(web.get("/v1/nothing"), 404)
        check(web.get("/health/"), 404)
        check(web.get("/%ff%00"), 404)
        check(web.get("/v1/models/none"), 404)
        check(web.post("/detokenize", json={"tokens": [10**6]}), 400)
        check(web.post("/tokenize", json={"prompt": "x", "model": "none"}), 404)
        assert web.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    check(
        httpx.post(f"{served.url}/v1/completions", json={**COMPLETION, "model": "h2o", "echo": True, "logprobs": 1}),
        400,
    )


def test_too_long_says_both_numbers(served: Any) -> None:
    error = check(
        httpx.post(f"{served.url}/v1/completions", json={**COMPLETION, "prompt": [5] * 505, "max_tokens": 9}), 400
    )
    assert error["message"] == "a prompt of 505 tokens and 9 generated ones make 514: at most 512 are served"
    assert error["code"] == "context_length_exceeded"


def test_connections_that_send_little_or_read_nothing_hold_nobody_up(served: Any, caplog: Any) -> None:
    theirs = served.worker
    host, port = "127.0.0.1", int(served.url.rsplit(":", 1)[1])
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    asked = json.dumps({"model": "own", "prompt": "line", "max_tokens": 300, "ignore_eos": True, "stream": True})
    half = [socket.create_connection((host, port)) for _ in range(20)]
    for index, each in enumerate(half):
        each.sendall([b"", b"POST", head.encode(), (head + "Content-Length: 500\r\n\r\n{").encode()][index % 4])
    slow = socket.create_connection((host, port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    slow.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n{asked}".encode())
    begin = time.monotonic()
    assert httpx.post(f"{served.url}/v1/completions", json=COMPLETION, timeout=20).status_code == 200
    assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200
    for each in half:
        each.close()
    slow.close()
    served.wait_until_idle()
    assert not [record for record in caplog.records if record.exc_info], "a client that goes is no error"
    assert time.monotonic() - begin < 30
    assert theirs.failure is None


def test_a_body_that_does_not_come_is_given_up(make_server: Any, served: Any) -> None:
    server = make_server({"own": served.worker.engines["own"]}, body_seconds=0.2)
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as each:
        each.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert each.recv(4096).startswith(b"HTTP/1.1 408")


LARGE: dict[str, Any] = {
    "prompt": [1.5] * 80_000,
    "messages": [3] * 300_000,
    "content": [{"role": "user", "content": [3] * 300_000}],
    "logit_bias": {f"x{index}": "x" for index in range(80_000)},
    "stop": [3] * 80_000,
    "stop_token_ids": ["x"] * 80_000,
    "stream_options": {f"x{index}": 1 for index in range(80_000)},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_thousand_faults_are_one_error(name: str) -> None:
    """One error for each would take gigabytes."""
    route, body = ("chat/completions", CHAT) if name in ("messages", "content") else ("completions", COMPLETION)
    given = json.dumps({**body, "messages" if name == "content" else name: LARGE[name]}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(APIError) as caught:
            read(f"/v1/{route}", given)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(given) + 2**20  # the values themselves
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300


def test_a_key_is_asked_for_whatever_the_host_header_says(make_server: Any, served: Any) -> None:
    server = make_server({"own": served.worker.engines["own"]}, keys=("secret",))
    for host in ("x/health?", "x/?", "x/health#"):
        check(httpx.post(f"{server.url}/v1/completions", json=COMPLETION, headers={"Host": host}), 401)
