"""Metrics of a server in Prometheus' format."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter as get
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
RATIOS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)
ENTRIES = tuple(4**power for power in range(3, 14))
BYTES = tuple(64 * entries for entries in ENTRIES)
METRICS: tuple[tuple[str, Any, str, str, Callable[[Any], float], tuple[float, ...]], ...] = (
    ("engine", Gauge, "dmc_requests_running", "Sequences in the cache.", get("num_running"), ()),
    ("engine", Gauge, "dmc_requests_waiting", "Sequences that wait for blocks.", get("num_waiting"), ()),
    ("engine", Gauge, "dmc_pool_blocks", "Blocks of the cache.", get("cache.allocator.num_blocks"), ()),
    ("engine", Gauge, "dmc_pool_blocks_in_use", "Blocks held by requests.", get("blocks_in_use"), ()),
    ("engine", Gauge, "dmc_prefix_cache_bytes", "Bytes of cached prefixes.", get("prefix_cache_bytes"), ()),
    ("first", Histogram, "dmc_time_to_first_token_seconds", "From arrival to first token.", float, SECONDS),
    ("later", Histogram, "dmc_time_per_output_token_seconds", "Between two tokens.", float, SECONDS),
    ("token", Counter, "dmc_generated_tokens", "Tokens generated.", float, ()),
    ("prompt", Counter, "dmc_prompt_tokens", "Tokens of prompts.", get("prompt_end"), ()),
    ("prompt", Counter, "dmc_prefix_cache_hit_tokens", "Prompt tokens reused.", get("num_reused"), ()),
    ("prompt", Counter, "dmc_preemptions", "Preemptions of requests.", get("num_preemptions"), ()),
    ("end", Histogram, "dmc_achieved_ratio", "Compression ratio at a request's end.", get("achieved_ratio"), RATIOS),
    (
        "end",
        Histogram,
        "dmc_request_slots",
        "Entries at a request's end.",
        lambda stats: int(stats.slots.sum()),
        ENTRIES,
    ),
    ("end", Histogram, "dmc_request_bytes", "Bytes of cache at a request's end.", get("bytes_used"), BYTES),
)
"""Moment of the update, type, name, help, value as a function of what `count` is given, and buckets."""
UPDATE: dict[Any, Any] = {Gauge: Gauge.set, Counter: Counter.inc, Histogram: Histogram.observe}


class Metrics:
    """Metrics by served name; tokens per second are the rate of `dmc_generated_tokens_total`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._tasks = Gauge("dmc_tasks", "Tasks of the event loop.", registry=self._registry)
        labels = ["model", "finish_reason"]
        self.finished = Counter("dmc_requests", "Prompts that have ended.", labels, registry=self._registry)
        self._by_moment: Any = collections.defaultdict(list)
        for moment, kind, name, text, value_of, buckets in METRICS:
            metric = kind(name, text, labels[:1], registry=self._registry, **({"buckets": buckets} if buckets else {}))
            self._by_moment[moment].append((metric, UPDATE[kind], value_of))

    def count(self, model: str, moment: str, given: Any) -> None:
        """Update the metrics of a moment from an engine, a token's seconds, a sequence or its stats."""
        for metric, update, value_of in self._by_moment[moment]:
            update(metric.labels(model), value_of(given))

    def collect(self) -> list[Metric]:
        """Return all metrics; call it in the event loop."""
        self._tasks.set(len(asyncio.all_tasks()))
        return [*self._registry.collect()]


def text_format(collected: Mapping[str, Iterable[Metric]]) -> bytes:
    """Write the metrics of processes in the text format of Prometheus.

    Args:
        collected: metrics of each process by its name, which labels its samples: sums would fall when one ends.
    """
    by_name: dict[str, Metric] = {}
    for replica, metrics in collected.items():
        for metric in metrics:
            joined = by_name.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            label = {"replica": replica} if replica else {}
            joined.samples += [sample._replace(labels={**sample.labels, **label}) for sample in metric.samples]
    source: Any = SimpleNamespace(collect=by_name.values)
    return generate_latest(source)
