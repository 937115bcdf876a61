"""Load on servers of OpenAI's API: requests at random times, with the latencies of their tokens, or a crowd."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import pandas
from pydantic import Field, StrictFloat, StrictInt

from dmc.config.settings import Count, Positive, checked_dataclass
from dmc.results.measurement import Row, new_row
from dmc.results.store import Store

NONSENSE = (b"{", b"[]", b"\xff", b'{"model": 3}', b'{"model": "m", "prompt": ""}', b'{"prompt": [1.5]}')
VISITS = {"answered": 6, "streamed": 6, "left": 3, "dropped": 2, "refused": 3}
"""How often clients of a crowd do what."""
NUM_PROMPTS = 4
"""Of each name, in a crowd."""
POLL_SECONDS = 0.1
SETTLED = 0.2
"""Part of the time after which the server's memory shall not grow any more."""
GAUGES = ("dmc_pool_blocks_in_use", "dmc_requests_running", "dmc_requests_waiting", "dmc_tasks")
RESIDENT = "process_resident_memory_bytes"


@checked_dataclass(frozen=True)
class LoadConfig:
    """Settings of a load test.

    Raises:
        ValueError: a value is out of range.
    """

    server: str
    """Address of the server, with or without /v1."""
    model: str | None = None
    """Name of the model on the server; None: its first, and all of them for a crowd."""
    rates: Annotated[list[Positive | None], Field(min_length=1)] = field(default_factory=lambda: [None])
    """Rates of requests per second, as a Poisson process; None: all at once, up to `concurrency`."""
    num_requests: Count = 64
    """Number of requests at each rate."""
    concurrency: Count = 256
    """Maximum number of concurrent requests."""
    prompt_tokens: tuple[Count, Count] = (64, 256)
    """Minimum and maximum tokens of a prompt, all lengths equally likely."""
    new_tokens: tuple[Count, Count] = (32, 128)
    vocab_size: Count = 1000
    """Prompts are tokens below it."""
    first_seconds: StrictFloat = 2.0
    """A request is in time if its first token takes at most this many seconds, and the others on average at most:"""
    token_seconds: StrictFloat = 0.2
    api_key: str = "none"
    fields: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "ignore_eos": True})
    """Further fields of a request's body; `ignore_eos` is an extension of this server and vLLM."""
    seed: StrictInt = 0
    crowd_seconds: Positive | None = None
    """`concurrency` clients that also break off, drop and send nonsense, for so long; None: requests at `rates`."""
    output: str = "outputs/load"

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name}={[least, most]}: expected the least and the most")
        if not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server={self.server}: expected an address such as http://127.0.0.1:8000")

    @property
    def client(self) -> dict[str, Any]:
        """Return options of a client: the address without /v1, and the key as servers read it."""
        root = self.server.rstrip("/").removesuffix("/v1")
        return {"base_url": root, "headers": {"Authorization": f"Bearer {self.api_key}"}}

    def body(self, name: str, draw: random.Random, new_tokens: int) -> dict[str, Any]:
        """Return a request with a random prompt."""
        prompt = [draw.randrange(1, self.vocab_size) for _ in range(draw.randint(*self.prompt_tokens))]
        return {"model": name, "prompt": prompt, "max_tokens": new_tokens} | self.fields


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


@dataclass
class Watch:
    """What a server tells of itself while it is loaded."""

    health: list[float] = field(default_factory=list)
    """Seconds that /health took."""
    failed: int = 0
    gauges: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Time and values of a server of ours."""

    def most(self, gauge: str) -> float | None:
        """Return the maximum of a gauge; None for other servers."""
        return max((values[gauge] for _, values in self.gauges if gauge in values), default=None)


def report_load(config: LoadConfig) -> str:
    """Load the server, keep the rows beside those of earlier loads, and return a table, a line for each metric."""
    rows = run_load(config, Store(Path(config.output) / "cells.jsonl").append)
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    table = {row["method"]: [row["metrics"].get(name, math.nan) for name in names] for row in rows}
    return str(pandas.DataFrame(table, index=names).to_string(float_format=lambda value: f"{value:.4g}"))


def run_load(config: LoadConfig, on_row: Callable[[Row], None]) -> list[Row]:
    """Load the server at every rate, or with a crowd.

    Args:
        config: settings of the load test.
        on_row: receives every row as soon as it is measured.
    Raises:
        OSError: the server does not respond, or no request was answered.
    """
    try:
        with httpx.Client(**config.client) as web:
            names = [config.model] if config.model else [each["id"] for each in web.get("/v1/models").json()["data"]]
        name = names[0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise OSError(f"{config.server} lists no models ({error}): check server=, or set model=") from error
    rows: list[Row] = []

    def keep(name: str, policy: str, metrics: Mapping[str, float], samples: int, place: Mapping[str, float]) -> None:
        settings: dict[str, Any] = {"model": {"path": name}, "policy": {}}
        settings["task"] = {key: value for key, value in asdict(config).items() if key != "api_key"}
        figures = {"metrics": metrics, "coordinates": place, "samples": samples, "achieved_ratio": None}
        rows.append(new_row(name, policy, "load", settings, **figures))
        on_row(rows[-1])

    if config.crowd_seconds is not None:
        metrics = asyncio.run(_crowd(config, names, config.crowd_seconds))
        keep(", ".join(names), "crowd", metrics, int(metrics["answered"] + metrics["streamed"]), {})
        return rows
    for rate in config.rates:
        begin = time.monotonic()
        visits, watch = asyncio.run(_load(config, name, rate))
        if all(visit.error for visit in visits):
            raise OSError(f"{config.server} answers no request: {visits[0].error}")
        metrics = summarize(visits, config, time.monotonic() - begin)
        metrics |= {"health_seconds_max": max(watch.health)} if watch.health else {}
        metrics |= {} if (most := watch.most("dmc_requests_running")) is None else {"held_at_once": most}
        shown = "saturated" if rate is None else f"{rate:g} requests/s"
        keep(name, shown, metrics, len(visits), {} if rate is None else {"rate": rate})
    return rows


def summarize(visits: list[Visit], config: LoadConfig, seconds: float) -> dict[str, float]:
    """Summarize requests: percentiles of seconds, tokens per second and requests in time per second."""
    good = [visit for visit in visits if visit.error is None and visit.times]
    found: dict[str, float] = {"failed": len(visits) - len(good)}
    for name, of in (("first_token", "first"), ("token", "each"), ("request", "whole")):
        values = [getattr(visit, of) for visit in good]
        found |= {f"{name}_seconds_p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
    in_time = [v for v in good if v.first <= config.first_seconds and v.each <= config.token_seconds]
    found["tokens_per_second"] = sum(len(visit.times) for visit in good) / seconds
    found["requests_per_second"] = len(good) / seconds
    found["goodput"] = len(in_time) / seconds
    return found


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else sum(values)


async def _load(config: LoadConfig, name: str, rate: float | None) -> tuple[list[Visit], Watch]:
    draw, tasks = random.Random(config.seed), []
    room, begin = asyncio.Semaphore(config.concurrency), time.monotonic()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(**config.client, limits=limits, timeout=None) as web, _watching(config) as watch:
        for _ in range(config.num_requests):
            if rate is not None:
                await asyncio.sleep(draw.expovariate(rate))
            body = config.body(name, draw, draw.randint(*config.new_tokens))
            tasks.append(asyncio.create_task(_visit(web, body, room, begin, rate is None)))
        return list(await asyncio.gather(*tasks)), watch


async def _visit(
    web: httpx.AsyncClient, body: dict[str, Any], room: asyncio.Semaphore, begin: float, waits: bool
) -> Visit:
    visit = Visit(time.monotonic() - begin)
    async with room:
        if waits:
            visit.sent = time.monotonic() - begin  # it was scheduled for this time
        try:
            async for _ in _pieces(web, body):
                visit.times.append(time.monotonic() - begin)
        except (httpx.HTTPError, ValueError) as error:
            visit.error = str(error) or repr(error)
    visit.end = time.monotonic() - begin
    return visit


async def _pieces(web: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[str, None]:
    """Yield the text of each piece of a streamed answer.

    Raises:
        httpx.HTTPError: it is refused, or breaks off.
        ValueError: it ends with an error.
    """
    async with web.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            said = (await answer.aread()).decode(errors="replace")[:200]
            raise httpx.HTTPStatusError(f"{answer.status_code} {said}", request=answer.request, response=answer)
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise ValueError(str(piece["error"])[:200])
                if piece.get("choices"):
                    yield piece["choices"][0]["text"]


@asynccontextmanager
async def _watching(config: LoadConfig) -> AsyncIterator[Watch]:
    """Ask /health and /metrics again and again meanwhile."""
    watch = Watch()

    async def look() -> None:
        async with httpx.AsyncClient(**config.client, timeout=60) as web:
            while True:
                begin = time.monotonic()
                try:
                    (await web.get("/health")).raise_for_status()
                    watch.health.append(time.monotonic() - begin)
                    watch.gauges.append((begin, await _gauges(web)))
                except httpx.HTTPError:
                    watch.failed += 1
                await asyncio.sleep(POLL_SECONDS)

    looking = asyncio.create_task(look())
    try:
        yield watch
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _gauges(web: httpx.AsyncClient) -> dict[str, float]:
    """Read what a server of ours tells of itself, all names and replicas together; empty for others."""
    found: dict[str, float] = {}
    for line in (await web.get("/metrics")).text.splitlines():
        if line.startswith((*GAUGES, RESIDENT)):
            place, _, value = line.rpartition(" ")
            name = place.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def _crowd(config: LoadConfig, names: list[str], seconds: float) -> dict[str, float]:
    """Let `concurrency` clients behave at random, and look at what they leave behind.

    Every answer is compared with what the same prompt was answered when nobody else was there.
    """
    draw = random.Random(config.seed)
    asked = [config.body(name, draw, config.new_tokens[1]) for name in names * NUM_PROMPTS]
    kinds = (*VISITS, "busy", "wrong", "failed")
    counts: dict[str, float] = dict.fromkeys(kinds, 0)
    limits = httpx.Limits(max_keepalive_connections=0)  # a kept one may be closed just when it is asked
    async with httpx.AsyncClient(**config.client, limits=limits, timeout=120) as web:
        expected = [_text(await web.post("/v1/completions", json=body)) for body in asked]
        start = time.monotonic()

        async def visit(seed: int) -> None:
            draw = random.Random(seed)
            while time.monotonic() < start + seconds:
                index, (kind,) = draw.randrange(len(asked)), draw.choices([*VISITS], [*VISITS.values()])
                try:
                    came = await _behave(web, kind, asked[index], expected[index], draw)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    is_busy = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 429
                    came = "busy" if is_busy else "failed"
                    await asyncio.sleep(0.1 * is_busy)
                counts[came] += 1

        async with _watching(config) as watch:
            await asyncio.gather(*(visit(seed) for seed in range(config.concurrency)))
        for _ in range(300):  # requests that were broken off have ended by then
            left = await _gauges(web)
            if not left.get("dmc_requests_running") and not left.get("dmc_pool_blocks_in_use"):
                break
            await asyncio.sleep(0.1)
    metrics = counts | {"health_failed": watch.failed, "probes": len(watch.health)}
    metrics |= {f"health_seconds_p{percent}": percentile(watch.health, percent) for percent in (50, 99)}
    metrics |= {"health_seconds_max": max(watch.health, default=math.inf)}
    metrics |= {f"{gauge.removeprefix('dmc_')}_left": left.get(gauge, 0.0) for gauge in GAUGES}
    if RESIDENT in left:
        settled = (values for when, values in watch.gauges if when > start + SETTLED * seconds and RESIDENT in values)
        before = next(settled, {}).get(RESIDENT, math.nan)
        metrics |= {"resident_bytes": left[RESIDENT], "resident_bytes_grown": left[RESIDENT] - before}
    return metrics


async def _behave(web: httpx.AsyncClient, kind: str, asked: dict[str, Any], expected: str, draw: random.Random) -> str:
    """Visit once; return what has come of it.

    Raises:
        httpx.HTTPError, ValueError, KeyError: it was refused, or has failed.
    """
    if kind == "refused":
        headers = {"content-type": "application/json"}
        answer = await web.post("/v1/completions", content=draw.choice(NONSENSE), headers=headers)
        return "refused" if 400 <= answer.status_code < 500 else "failed"
    if kind in ("answered", "dropped"):
        patience: dict[str, Any] = {"timeout": draw.uniform(0.01, 0.2)} if kind == "dropped" else {}
        try:
            answer = await web.post("/v1/completions", json=asked, **patience)
        except httpx.TimeoutException:
            return "dropped" if patience else "failed"
        return "answered" if _text(answer) == expected else "wrong"
    text = ""
    async with aclosing(_pieces(web, asked)) as pieces:
        async for piece in pieces:
            text += piece
            if kind == "left" and draw.random() < 0.3:
                return "left"
    return "streamed" if text == expected else "wrong"


def _text(answer: httpx.Response) -> str:
    return str(answer.raise_for_status().json()["choices"][0]["text"])
