"""A minute of the benchmark's crowd: clients that read, break off, drop their connection or send nonsense."""

from __future__ import annotations

import pytest

from dmc.results.load import LoadConfig, run_load

SECONDS = 60


@pytest.mark.slow
def test_a_crowd_leaves_nothing_behind_and_gets_its_own_answers(served):
    config = LoadConfig(
        served.url,
        "own",
        concurrency=64,
        prompt_tokens=(4, 30),
        new_tokens=(1, 30),
        vocab_size=200,
        crowd_seconds=SECONDS,
    )
    metrics = run_load(config, lambda row: None)[0]["metrics"]
    served.wait_until_idle(60)
    assert served.worker.failure is None
    assert (metrics["wrong"], metrics["failed"], metrics["health_failed"]) == (0, 0, 0)
    assert min(metrics[kind] for kind in ("answered", "streamed", "left", "refused", "dropped")) >= 5, metrics
    assert (metrics["pool_blocks_in_use_left"], metrics["requests_running_left"]) == (0, 0)
    assert metrics["resident_bytes_grown"] < 2**28
    assert metrics["tasks_left"] < 64
