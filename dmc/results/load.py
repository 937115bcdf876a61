"""Load on servers of OpenAI's API: streamed requests that arrive at random times, and the latencies of their tokens."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, field
from typing import Annotated, Any

import httpx
import numpy
from pydantic import Field, StrictInt

from dmc.config.settings import Count, Positive, checked_dataclass
from dmc.results.measurement import Row, new_row


@checked_dataclass(frozen=True)
class LoadConfig:
    """Settings of a load test."""

    server: Annotated[str, Field(pattern="^https?://")]  # without /v1
    model: str | None = None  # None: the server's first
    rates: Annotated[list[Positive | None], Field(min_length=1)] = field(default_factory=lambda: [None])
    """Rates of requests per second, as a Poisson process; None: all at once, up to `concurrency`."""
    num_requests: Count = 64  # at each rate
    concurrency: Count = 256
    prompt_tokens: tuple[Count, Count] = (64, 256)
    """Minimum and maximum tokens of a prompt, all lengths equally likely."""
    new_tokens: tuple[Count, Count] = (32, 128)
    vocab_size: Count = 1000  # prompts are random tokens below it
    api_key: str = "none"
    fields: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "ignore_eos": True})  # of every request
    seed: StrictInt = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens"):
            if getattr(self, name)[0] > getattr(self, name)[1]:
                raise ValueError(f"{name}={[*getattr(self, name)]}: expected the minimum and the maximum")


def run_load(config: LoadConfig, on_row: Callable[[Row], None]) -> list[Row]:
    """Load the server at every rate; raises OSError if it does not respond, or if every request fails."""
    rows: list[Row] = []
    task = {key: value for key, value in asdict(config).items() if key != "api_key"}
    for rate in config.rates:
        try:
            name, metrics = asyncio.run(_load(config, rate))
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise OSError(f"{config.server} does not answer: {str(error) or repr(error)}") from error
        figures: dict[str, Any] = {"metrics": metrics, "coordinates": {} if rate is None else {"rate": rate}}
        figures |= {"samples": config.num_requests, "achieved_ratio": None}
        settings = {"model": {"path": name}, "policy": {}, "task": task}
        shown = "saturated" if rate is None else f"{rate:g} requests/s"
        rows.append(new_row(name, shown, "load", settings, **figures))
        on_row(rows[-1])
    return rows


async def _load(config: LoadConfig, rate: float | None) -> tuple[str, dict[str, float]]:
    draw, slots, held = random.Random(config.seed), asyncio.Semaphore(config.concurrency), [0.0]
    options: dict[str, Any] = {"base_url": config.server, "headers": {"Authorization": f"Bearer {config.api_key}"}}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(**options, limits=limits, timeout=None) as client:
        name = config.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def send(body: dict[str, Any], arrival: float) -> list[float]:
            async with slots:
                times = [time.monotonic() if rate is None else arrival]
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    if answer.is_error:
                        raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()[:200]}")
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            piece = json.loads(line[6:])
                            if "error" in piece:
                                raise ValueError(str(piece["error"])[:200])
                            times += [time.monotonic()] * bool(piece["choices"])  # one token each
            return [*times, time.monotonic()]

        async def poll() -> None:
            while True:
                lines = (await client.get("/metrics")).text.splitlines()
                held.append(sum(float(x.split()[-1]) for x in lines if x.startswith("dmc_requests_running{")))  # ours
                await asyncio.sleep(0.1)

        polling, tasks, begin = asyncio.create_task(poll()), [], time.monotonic()
        for _ in range(config.num_requests):
            await asyncio.sleep(0 if rate is None else draw.expovariate(rate))
            prompt = [draw.randrange(1, config.vocab_size) for _ in range(draw.randint(*config.prompt_tokens))]
            body = {"model": name, "prompt": prompt, "max_tokens": draw.randint(*config.new_tokens), "stream": True}
            tasks.append(asyncio.create_task(send(body | config.fields, time.monotonic())))
        ends, seconds = await asyncio.gather(*tasks, return_exceptions=True), time.monotonic() - begin
        polling.cancel()
    requests = [times for times in ends if isinstance(times, list)]
    for error in ends:
        if isinstance(error, BaseException) and not (requests and isinstance(error, (httpx.HTTPError, ValueError))):
            raise error
    metrics = {"failed": len(ends) - len(requests), **summarize(requests, seconds)}
    return name, metrics | ({"held_at_once": max(held)} if max(held) else {})


def summarize(requests: list[list[float]], seconds: float) -> dict[str, float]:
    """Summarize requests, each the times of its arrival, its tokens and its end."""
    found = {"tokens_per_second": sum(len(times) - 2 for times in requests) / seconds}
    found["requests_per_second"] = len(requests) / seconds
    latencies = {
        "first_token": [times[1] - times[0] for times in requests],
        "token": [(times[-2] - times[1]) / max(len(times) - 3, 1) for times in requests],
        "request": [times[-1] - times[0] for times in requests],
    }
    for name, values in latencies.items():
        found |= {f"{name}_seconds_p{percent}": float(numpy.percentile(values, percent)) for percent in (50, 95, 99)}
    return found
