"""A crowd on a server of OpenAI's API: clients that read, break off, drop their connection or send nonsense."""

from __future__ import annotations

import asyncio
import collections
import json
import math
import random
import time
from dataclasses import asdict
from typing import Any

import httpx

from dmc.results.load_config import LoadConfig, headers_of, percentile
from dmc.results.measurement import Row, new_row

NONSENSE = (b"{", b"[]", b"\xff", b'{"model": 3}', b'{"model": "m", "prompt": ""}', b'{"prompt": [1.5]}')
KINDS = ("answered", "streamed", "left", "dropped", "refused", "busy", "wrong", "failed", "health_failed")
NUM_PROMPTS = 4
"""Of each name."""
POLL_SECONDS = 0.05
SETTLED = 0.2
"""Part of the time after which the server's memory shall not grow any more."""
GAUGES = ("dmc_pool_blocks_in_use", "dmc_requests_running", "dmc_requests_waiting", "dmc_tasks")


def run_crowd(config: LoadConfig, names: list[str]) -> Row:
    """Let `concurrency` clients behave at random for `crowd_seconds`, and look at what they leave behind.

    Every answer is compared with what the same prompt was answered when nobody else was there.
    """
    counts, health, begin, end = asyncio.run(_crowd(config, names))
    metrics: dict[str, float] = dict(counts) | {"health_seconds_p50": percentile(health, 50)}
    metrics |= {
        "health_seconds_p99": percentile(health, 99),
        "health_seconds_max": max(health, default=math.inf),
        "probes": len(health),
    }
    for gauge in GAUGES:
        metrics[f"{gauge.removeprefix('dmc_')}_left"] = end.get(gauge, 0.0)
    if "process_resident_memory_bytes" in end:
        metrics["resident_bytes"] = end["process_resident_memory_bytes"]
        before = begin.get("process_resident_memory_bytes", math.nan)
        metrics["resident_bytes_grown"] = end["process_resident_memory_bytes"] - before
    name = ", ".join(names)
    settings: dict[str, Any] = {"model": {"path": name}, "policy": {}}
    settings["task"] = {key: value for key, value in asdict(config).items() if key != "api_key"}
    answered = int(counts["answered"] + counts["streamed"])
    return new_row(name, "crowd", "load", settings, metrics=metrics, samples=answered, achieved_ratio=None)


async def _crowd(
    config: LoadConfig, names: list[str]
) -> tuple[collections.Counter[str], list[float], dict[str, float], dict[str, float]]:
    draw = random.Random(config.seed)
    asked = []
    for name in names * NUM_PROMPTS:
        prompt = [draw.randrange(1, config.vocab_size) for _ in range(draw.randint(*config.prompt_tokens))]
        asked.append({"model": name, "prompt": prompt, "max_tokens": config.new_tokens[1]} | config.fields)
    counts = collections.Counter(dict.fromkeys(KINDS, 0))
    health: list[float] = []
    limits = httpx.Limits(max_keepalive_connections=0)  # a kept one may be closed just when it is asked
    options: dict[str, Any] = {"base_url": config.root, "headers": headers_of(config), "limits": limits}
    async with (
        httpx.AsyncClient(**options, timeout=120) as web,
        httpx.AsyncClient(**options, timeout=60) as other,
    ):
        expected = [_text((await web.post("/v1/completions", json=body)).json()) for body in asked]
        start = time.monotonic()
        last = start + (config.crowd_seconds or 0.0)

        async def visit(seed: int) -> None:
            draw = random.Random(seed)
            while time.monotonic() < last:
                index = draw.randrange(len(asked))
                kind = draw.choices(("answered", "streamed", "left", "dropped", "refused"), (6, 6, 3, 2, 3))[0]
                try:
                    counts[await _behave(web, kind, asked[index], expected[index], draw)] += 1
                except (httpx.HTTPError, ValueError, KeyError):
                    counts["failed"] += 1

        async def watch() -> dict[str, float]:
            settled: dict[str, float] = {}
            while time.monotonic() < last:
                begin = time.monotonic()
                try:
                    (await other.get("/health")).raise_for_status()
                    health.append(time.monotonic() - begin)
                except httpx.HTTPError:
                    counts["health_failed"] += 1
                if not settled and time.monotonic() > start + SETTLED * (last - start):
                    settled = await _gauges(other)
                await asyncio.sleep(POLL_SECONDS)
            return settled

        visits = asyncio.gather(*(visit(seed) for seed in range(config.concurrency)))
        settled = await watch()
        await visits
        for _ in range(300):  # requests that were broken off have ended by then
            left = await _gauges(other)
            if not left.get("dmc_requests_running") and not left.get("dmc_pool_blocks_in_use"):
                break
            await asyncio.sleep(0.1)
    return counts, health, settled, left


async def _behave(web: httpx.AsyncClient, kind: str, asked: dict[str, Any], expected: str, draw: random.Random) -> str:
    """Visit once; return what has come of it."""
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
        if answer.status_code == 429:
            await asyncio.sleep(0.1)
            return "busy"
        return "answered" if _text(answer.raise_for_status().json()) == expected else "wrong"
    text = ""
    async with web.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        if answer.status_code == 429:
            await asyncio.sleep(0.1)
            return "busy"
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += _text(json.loads(line[6:]))
                if kind == "left" and draw.random() < 0.3:
                    return "left"
    return "streamed" if text == expected else "wrong"


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


async def _gauges(web: httpx.AsyncClient) -> dict[str, float]:
    """Read what a server of ours tells of itself, all names together; empty for others."""
    found: dict[str, float] = {}
    for line in (await web.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            place, _, value = line.rpartition(" ")
            found[place.partition("{")[0]] = found.get(place.partition("{")[0], 0.0) + float(value)
    return found
