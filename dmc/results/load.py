"""Load generator for servers of OpenAI's API: random arrivals, latencies of tokens, and the share within limits."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pandas

from dmc.results.crowd import run_crowd
from dmc.results.load_config import LoadConfig, headers_of, percentile
from dmc.results.measurement import Row, new_row
from dmc.results.store import Store

POLL_SECONDS = 0.1


@dataclass
class Visit:
    """Times of one request, in seconds since the load began."""

    sent: float
    times: list[float] = field(default_factory=list)
    """Times of its tokens: pieces of a stream, each of which counts as one token."""
    end: float = 0.0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def whole(self) -> float:
        """Seconds to the end."""
        return self.end - self.sent

    @property
    def each(self) -> float:
        """Mean seconds per token after the first."""
        return (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)


def run_load(config: LoadConfig, on_row: Callable[[Row], None]) -> list[Row]:
    """Load the server at every rate.

    Args:
        config: settings of the load test.
        on_row: receives every row as soon as it is measured.
    Raises:
        OSError: the server does not respond, or no request was answered.
    """
    rows = []
    try:
        known = [config.model] if config.model else _names(config)
        name = known[0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise OSError(f"{config.root}/v1/models lists no models ({error}): check server=, or set model=") from error
    if config.crowd_seconds is not None:
        rows.append(run_crowd(config, known))
        on_row(rows[0])
        return rows
    for rate in config.rates:
        begin = time.monotonic()
        visits, held = asyncio.run(_load(config, name, rate))
        if all(visit.error for visit in visits):
            raise OSError(f"{config.root} answers no request: {visits[0].error}")
        metrics = summarize(visits, config, time.monotonic() - begin) | held
        settings = {
            "model": {"path": name},
            "policy": {},
            "task": {k: v for k, v in asdict(config).items() if k != "api_key"},
        }
        place = {} if rate is None else {"rate": rate}
        figures = {"metrics": metrics, "coordinates": place, "samples": len(visits), "achieved_ratio": None}
        shown = "saturated" if rate is None else f"{rate:g} requests/s"
        row = new_row(name, shown, "load", settings, **figures)
        on_row(row)
        rows.append(row)
    return rows


def summarize(visits: list[Visit], config: LoadConfig, seconds: float) -> dict[str, float]:
    """Summarize requests: percentiles of seconds, tokens per second and requests in time per second."""
    good = [visit for visit in visits if visit.error is None and visit.times]
    found: dict[str, float] = {"failed": len(visits) - len(good)}
    seconds_of = {
        "first_token": [visit.first for visit in good],
        "token": [visit.each for visit in good],
        "request": [visit.whole for visit in good],
    }
    for name, values in seconds_of.items():
        for percent in (50, 95, 99):
            found[f"{name}_seconds_p{percent}"] = percentile(values, percent)
    in_time = [v for v in good if v.first <= config.first_seconds and v.each <= config.token_seconds]
    found["tokens_per_second"] = sum(len(visit.times) for visit in good) / seconds
    found["requests_per_second"] = len(good) / seconds
    found["goodput"] = len(in_time) / seconds
    return found


def report_load(config: LoadConfig) -> str:
    """Load the server, keep the rows beside those of earlier loads, and return a table."""
    return table_of(run_load(config, Store(Path(config.output) / "cells.jsonl").append))


def table_of(rows: list[Row]) -> str:
    """Write rows side by side, one line for each metric."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    table = {row["method"]: [row["metrics"].get(name, math.nan) for name in names] for row in rows}
    return str(pandas.DataFrame(table, index=names).to_string(float_format=lambda value: f"{value:.4g}"))


def _names(config: LoadConfig) -> list[str]:
    answer = httpx.get(f"{config.root}/v1/models", headers=headers_of(config))
    return [each["id"] for each in answer.json()["data"]]


async def _load(config: LoadConfig, name: str, rate: float | None) -> tuple[list[Visit], dict[str, float]]:
    draw, tasks = random.Random(config.seed), []
    room, begin = asyncio.Semaphore(config.concurrency), time.monotonic()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=config.root, headers=headers_of(config), limits=limits, timeout=None) as web:
        held: dict[str, float] = {}
        watching = asyncio.create_task(_watch(web, name, held))
        for _ in range(config.num_requests):
            if rate is not None:
                await asyncio.sleep(draw.expovariate(rate))
            prompt = [draw.randrange(1, config.vocab_size) for _ in range(draw.randint(*config.prompt_tokens))]
            body = {"model": name, "prompt": prompt, "max_tokens": draw.randint(*config.new_tokens), "stream": True}
            tasks.append(asyncio.create_task(_visit(web, body | config.fields, room, begin, rate is None)))
        visits = list(await asyncio.gather(*tasks))
        watching.cancel()
    return visits, held


async def _visit(
    web: httpx.AsyncClient, body: dict[str, Any], room: asyncio.Semaphore, begin: float, waits: bool
) -> Visit:
    visit = Visit(time.monotonic() - begin)
    async with room:
        if waits:
            visit.sent = time.monotonic() - begin  # it was scheduled for this time
        try:
            async with web.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    visit.error = f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:200]}"
                    return visit
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    piece = json.loads(line[6:])
                    if "error" in piece:
                        visit.error = str(piece["error"])[:200]
                    elif piece.get("choices"):
                        visit.times.append(time.monotonic() - begin)
        except httpx.HTTPError as error:
            visit.error = repr(error)
    visit.end = time.monotonic() - begin
    return visit


async def _watch(web: httpx.AsyncClient, name: str, held: dict[str, float]) -> None:
    """Record the maximum of concurrently held requests, if the server is ours, and the latency of /health."""
    while True:
        try:
            begin = time.monotonic()
            await web.get("/health")
            held["health_seconds_max"] = max(held.get("health_seconds_max", 0.0), time.monotonic() - begin)
            lines = (await web.get("/metrics")).text.splitlines()
            running = [
                float(line.split()[-1]) for line in lines if line.startswith(f'dmc_requests_running{{model="{name}"')
            ]
            if running:  # one number, or one of each replica
                held["held_at_once"] = max(held.get("held_at_once", 0.0), sum(running))
        except httpx.HTTPError:
            pass
        await asyncio.sleep(POLL_SECONDS)
