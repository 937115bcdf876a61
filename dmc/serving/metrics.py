"""What a server counts, in Prometheus' form."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from dmc.runtime import Engine, Request

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
RATIOS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)
ENTRIES = tuple(4**power for power in range(3, 14))


GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "dmc_requests_running": ("Sequences in the cache.", lambda engine: engine.num_running),
    "dmc_requests_waiting": ("Sequences that wait for room.", lambda engine: engine.num_waiting),
    "dmc_pool_blocks": ("Blocks of the cache.", lambda engine: engine.cache.allocator.num_blocks),
    "dmc_pool_blocks_in_use": ("Blocks held by requests.", lambda engine: engine.blocks_in_use),
    "dmc_prefix_cache_bytes": ("Bytes of prefixes alone.", lambda engine: engine.prefix_cache_bytes),
}
LOOK_SECONDS = 0.5


class Metrics:
    """Counters by served name; tokens a second are the rate of `dmc_generated_tokens_total`.

    Args:
        engines: their names.
    """

    def __init__(self, engines: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._tasks = Gauge("dmc_tasks", "Tasks of the event loop.", registry=self.registry)
        own: dict[str, Any] = {"labelnames": ["model"], "registry": self.registry}
        self._requests = Counter(
            "dmc_requests", "Prompts that have ended.", ["model", "finish_reason"], registry=self.registry
        )
        self._prompt = Counter("dmc_prompt_tokens", "Tokens of prompts.", **own)
        self._generated = Counter("dmc_generated_tokens", "Tokens generated.", **own)
        self._reused = Counter("dmc_prefix_cache_hit_tokens", "Tokens of prompts that were not computed again.", **own)
        self._preemptions = Counter("dmc_preemptions", "Times a request has given way to others.", **own)
        self._first = Histogram("dmc_time_to_first_token_seconds", "From arrival.", buckets=SECONDS, **own)
        self._each = Histogram("dmc_time_per_output_token_seconds", "Between two.", buckets=SECONDS, **own)
        self._ratio = Histogram("dmc_achieved_ratio", "Compression ratio at a request's end.", buckets=RATIOS, **own)
        self._slots = Histogram(
            "dmc_request_slots", "Entries held at a request's end, all heads.", buckets=ENTRIES, **own
        )
        self._bytes = Histogram(
            "dmc_request_bytes", "Bytes held at a request's end.", buckets=[64 * each for each in ENTRIES], **own
        )
        self._gauges = {name: Gauge(name, text, **own) for name, (text, _) in GAUGES.items()}
        self._looked = dict.fromkeys(engines, -math.inf)

    def look_at(self, name: str, engine: Engine, is_idle: bool) -> None:
        """Note an engine's state, from its own thread: now and then, and always when it goes idle."""
        if is_idle or time.monotonic() - self._looked[name] > LOOK_SECONDS:
            self._looked[name] = time.monotonic()
            for gauge, (_, read) in GAUGES.items():
                self._gauges[gauge].labels(name).set(read(engine))

    def count_token(self, name: str, seconds: float, is_first: bool) -> None:
        """Count one that has come so long after the request or the one before."""
        self._generated.labels(name).inc()
        (self._first if is_first else self._each).labels(name).observe(seconds)

    def count_request(self, name: str, request: Request) -> None:
        """Count one that has ended."""
        assert request.generation is not None
        stats, reason = request.generation.stats, request.generation.finish_reason
        self._requests.labels(name, reason).inc()
        self._prompt.labels(name).inc(request.sequence.prompt_end)
        self._reused.labels(name).inc(request.sequence.num_reused)
        self._preemptions.labels(name).inc(stats.num_preemptions)
        if stats.tokens_seen:
            self._ratio.labels(name).observe(stats.achieved_ratio)
            self._slots.labels(name).observe(int(stats.slots.sum()))
            self._bytes.labels(name).observe(stats.bytes_used)

    def text(self) -> bytes:
        """Write all of it, in the event loop."""
        self._tasks.set(len(asyncio.all_tasks()))
        return generate_latest(self.registry)
