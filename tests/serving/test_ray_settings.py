"""What is known of replicas before any has started: settings, conversations, labels of metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from scripts_here import run_script

from dmc.serving.metrics import text_format
from dmc.serving.requests import ChatRequest, CompletionRequest, DetokenizeRequest


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("autoscaling.max_replicas=1", "max_replicas (1) must be greater than or equal to min_replicas (2)"),
        ("autoscaling.target_ongoing_requests=0", "Input should be greater than 0"),
        ("+autoscaling.max_replica=3", "unknown setting autoscaling.max_replica"),
    ],
)
def test_wrong_scaling_ends_in_one_line(folders: Any, setting: str, message: str, monkeypatch: Any) -> None:
    pytest.importorskip("ray.serve")
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    error = run_script("serve.py", f"model={folders.stock}", "port=0", "replicas=2", setting)
    assert message in error and error.startswith("error: ") and "\n" not in error


def test_a_conversation_is_known_by_its_users_first_words() -> None:
    session_id = pytest.importorskip("dmc.serving.ray_app", exc_type=ImportError).session_id

    def conversation(*texts: str) -> str:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return session_id(ChatRequest(model="m", messages=messages))

    first = conversation("rules", "a")
    assert first == conversation("rules", "a", "b", "c") != conversation("rules", "b", "b", "c")
    long = session_id(CompletionRequest(model="m", prompt=[1] * 200))
    assert long == session_id(CompletionRequest(model="m", prompt=[1] * 200 + [2]))
    assert session_id(DetokenizeRequest(tokens=[1])) == ""


def test_metrics_of_replicas_are_labeled() -> None:
    def count(number: int) -> Any:
        registry = CollectorRegistry()
        Counter("a", "Some.", ["model"], registry=registry).labels("m n").inc(number)
        Histogram("b", "More.", registry=registry, buckets=(1, 2)).observe(number)
        return registry.collect()

    lines = text_format({"x": count(1), "y": count(2)}).decode().splitlines()
    assert lines.count("# TYPE a_total counter") == 1
    at = lines.index('a_total{model="m n",replica="x"} 1.0')
    assert lines[at + 1] == 'a_total{model="m n",replica="y"} 2.0'
    assert 'b_bucket{le="1.0",replica="y"} 0.0' in lines and 'b_sum{replica="x"} 1.0' in lines
