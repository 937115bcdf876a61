"""A wrong request gets one error in OpenAI's format, and the server goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from openai.types import chat, completion_create_params

from dmc.serving.requests import BODIES, IGNORED, APIError, parse

COMPLETION = {"model": "own", "prompt": "line 1", "max_tokens": 2}
CHAT = {"model": "own", "messages": [{"role": "user", "content": "line 1"}], "max_tokens": 2}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
WRONG_COMPLETIONS: list[tuple[str, Any, int]] = [
    *(("model", None, 400), ("model", 3, 400), ("model", "gpt-4", 404), ("model", "m" * 10000, 404)),
    *(("prompt", value, 400) for value in (None, "", [], [[]], [1.5], [83000], [-1], {}, True)),
    *(("max_tokens", value, 400) for value in (-1, "many", 1.5, 10**6, 10**30, True)),
    *(("temperature", -0.1, 400), ("temperature", True, 400), ("top_p", 0, 400), ("n", 33, 400), ("seed", 2**64, 400)),
    *(("stop", [""], 400), ("stop", ["a"] * 33, 400), ("stop", ["a" * 1001], 400), ("stop_token_ids", [10**6], 400)),
    *(("stream", "yes", 400), ("stream_options", True, 400), ("stream_options", {"include_everything": True}, 422)),
    *(("logprobs", 21, 400), ("presence_penalty", 3, 400), ("min_p", 2, 400), ("logit_bias", {"x": 1}, 400)),
    *(("logit_bias", {"99999": 1}, 400), ("logit_bias", {"1": 101}, 400), ("logit_bias", {"9" * 5000: 1}, 400)),
    *(("best_of", 3, 422), ("suffix", "end", 422), ("nonsense", 1, 422), ("n" * 5000, {}, 422), ("a b", 1, 422)),
]
WRONG_CHATS: list[tuple[str, Any, int]] = [
    *(("messages", value, 400) for value in (None, [], "hi", [3], [{}], [{"role": "user"}])),
    *(("messages", [{"role": role, "content": value}], 400) for role, value in (("king", "x"), ("user", 3))),
    ("messages", [{"role": "tool", "content": "x"}], 400),  # which the template refuses
    ("messages", [{"role": "user", "content": "x" * 50000}], 400),
    ("messages", [{"role": "user", "content": [IMAGE]}], 422),
    ("messages", [{"role": "user", "content": "x", "tool_calls": []}], 422),
    *(("logprobs", 3, 400), ("top_logprobs", 21, 400), ("tools", [{"type": "function"}], 422), ("store", True, 422)),
]
WRONG = [("completions", COMPLETION, *case) for case in WRONG_COMPLETIONS]
WRONG += [("chat/completions", CHAT, *case) for case in WRONG_CHATS]


def check(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    message = body["error"]["message"]
    assert message and "\n" not in message and "Traceback" not in message and len(message) < 1200
    return body["error"]


def test_a_wrong_field_is_named(served: Any) -> None:
    with httpx.Client(base_url=served.url) as web:
        for route, body, name, value, status in WRONG:
            error = check(web.post(f"/v1/{route}", json={**body, name: value}), status)
            expected = (name[:100], "prompt") if name == "max_tokens" else (name[:100],)  # the sum is too long
            assert error["param"].split(".")[0] in expected, (name, value, error)
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
    served = known & BODIES[path].model_fields.keys()
    assert len(served) >= 15
    for name in sorted(known - served - IGNORED):
        parse(BODIES[path], json.dumps({**body, name: None}).encode())
        with pytest.raises(APIError, match=f"{name}=.* is not served here") as caught:
            parse(BODIES[path], json.dumps({**body, name: {"x": 1}}).encode())
        assert (caught.value.status, caught.value.param) == (422, name)


NO_REQUESTS = [
    *(b"", b"{", b"null", b"[]", b"3", b"\xff\xfe", b"[" * 100000, b'{"model": ' + b"[" * 100000),
    *(b'{"model": "own", "prompt": ' + end for end in (b'"\xff"}', b'"\\ud800"}', b'"x", "temperature": NaN}')),
    *(b'{"model": "own", "prompt": "x", ' + end for end in (b'"\\ud800": 1}', b'"seed": ' + b"9" * 5000 + b"}")),
]


def test_a_body_that_is_no_request_is_refused(served: Any) -> None:
    with httpx.Client(base_url=served.url, headers={"content-type": "application/json"}) as web:
        for body in NO_REQUESTS:
            error = check(web.post("/v1/completions", content=body), 400)
            assert len(error["message"]) < 300
        check(web.post("/v1/completions", content=b'{"prompt": "' + b"x" * 10_000_000 + b'"}'), 413)


def test_wrong_content_types_routes_methods_and_models_are_refused(served: Any) -> None:
    body = json.dumps(COMPLETION)
    with httpx.Client(base_url=served.url) as web:
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            check(web.post("/v1/completions", content=body, headers={"content-type": content_type}), 415)
        check(web.get("/v1/completions"), 405)
        for path in ("/v1/nothing", "/health/", "/%ff%00", "/v1/models/none"):
            check(web.get(path), 404)
        check(web.post("/detokenize", json={"tokens": [10**6]}), 400)
        check(web.post("/tokenize", json={"prompt": "x", "model": "none"}), 404)
        assert web.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
        scored = {**COMPLETION, "model": "h2o", "echo": True, "logprobs": 1}  # under a policy
        check(web.post("/v1/completions", json=scored), 400)
        long = check(web.post("/v1/completions", json={**COMPLETION, "prompt": [5] * 505, "max_tokens": 9}), 400)
    assert long["message"] == "505 tokens of the prompt and 9 to generate are 514: at most 512 are served"
    assert long["code"] == "context_length_exceeded"


def test_slow_senders_and_slow_readers_do_not_block_others(served: Any, caplog: Any) -> None:
    host, port = "127.0.0.1", int(served.url.rsplit(":", 1)[1])
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = json.dumps({"model": "own", "prompt": "line", "max_tokens": 300, "ignore_eos": True, "stream": True})
    senders = [socket.create_connection((host, port)) for _ in range(20)]
    for index, sender in enumerate(senders):
        sender.sendall([b"", b"POST", head.encode(), (head + "Content-Length: 500\r\n\r\n{").encode()][index % 4])
    reader = socket.create_connection((host, port))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    reader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    assert httpx.post(f"{served.url}/v1/completions", json=COMPLETION, timeout=20).status_code == 200
    assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200
    for connection in (*senders, reader):
        connection.close()
    served.wait_until_idle()
    assert not [record for record in caplog.records if record.exc_info], "a client that disconnects is no error"
    assert served.worker.failure is None


def test_a_body_that_does_not_arrive_times_out(make_server: Any, served: Any) -> None:
    server = make_server({"own": served.worker.engines["own"]}, body_seconds=0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


LARGE: dict[str, Any] = {
    "prompt": [1.5] * 80_000,
    "messages": [3] * 300_000,
    "logit_bias": {f"x{index}": "x" for index in range(80_000)},
    "stream_options": {f"x{index}": 1 for index in range(80_000)},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_thousand_faults_are_one_error(name: str) -> None:
    path, body = ("/v1/chat/completions", CHAT) if name == "messages" else ("/v1/completions", COMPLETION)
    with pytest.raises(APIError) as caught:
        parse(BODIES[path], json.dumps({**body, name: LARGE[name]}).encode())
    assert len(str(caught.value)) < 300


def test_no_host_header_gets_around_the_key(make_server: Any, served: Any) -> None:
    server = make_server({"own": served.worker.engines["own"]}, keys=("secret",))
    for host in ("x/health?", "x/?", "x/health#"):
        check(httpx.post(f"{server.url}/v1/completions", json=COMPLETION, headers={"Host": host}), 401)
