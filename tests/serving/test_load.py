"""Many clients at once, some of which go away, talk nonsense or stop reading."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from dmc import Engine, SamplingParams

SECONDS = 20
CLIENTS = 64


def expected_texts(served: Any) -> list[tuple[tuple[str, str], str]]:
    found = []
    for name, theirs in served.worker.engines.items():
        engine = Engine(theirs.model, theirs.tokenizer, theirs.policy)
        prompts = [f"line {index} <b>{'x' * (7 * index % 60)}" for index in range(8)]
        generations = engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0))
        found += [((name, prompt), each.text) for prompt, each in zip(prompts, generations, strict=True)]
    return found


@pytest.mark.slow
def test_a_crowd_leaves_nothing_behind_and_gets_its_own_answers(served: Any) -> None:
    expected = expected_texts(served)
    counts = dict.fromkeys(("answered", "streamed", "left", "refused", "dropped", "busy"), 0)
    end = time.monotonic() + SECONDS

    async def visit(seed: int, client: openai.AsyncOpenAI, web: httpx.AsyncClient) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            (name, prompt), text = draw.choice(expected)
            asked: Any = {"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            kind = draw.random()
            try:
                if kind < 0.3:
                    assert (await client.completions.create(**asked)).choices[0].text == text
                    counts["answered"] += 1
                elif kind < 0.6:
                    pieces = await client.completions.create(**asked, stream=True)
                    assert "".join([piece.choices[0].text async for piece in pieces]) == text
                    counts["streamed"] += 1
                elif kind < 0.75:
                    stream = await client.completions.create(**{**asked, "max_tokens": 200}, stream=True)
                    async for _ in stream:
                        if draw.random() < 0.3:
                            break
                    await stream.close()
                    counts["left"] += 1
                elif kind < 0.9:
                    bad = draw.choice([b"{", b'{"model": 3}', b"\xff", b'{"model": "own", "prompt": ""}'])
                    answer = await web.post(
                        "/v1/completions", content=bad, headers={"content-type": "application/json"}
                    )
                    assert answer.status_code == 400
                    counts["refused"] += 1
                else:
                    try:
                        await web.post(
                            "/v1/completions", json={**asked, "max_tokens": 400}, timeout=draw.uniform(0.01, 0.2)
                        )
                    except httpx.TimeoutException:
                        counts["dropped"] += 1
            except openai.RateLimitError:
                counts["busy"] += 1
                await asyncio.sleep(0.1)

    async def watch(web: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            assert (await web.get("/health")).status_code == 200
            await asyncio.sleep(0.05)

    async def crowd() -> None:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with (
            openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
            httpx.AsyncClient(base_url=served.url, limits=limits, timeout=120) as web,
            httpx.AsyncClient(base_url=served.url, timeout=30) as other,
        ):
            await asyncio.gather(*(visit(seed, client, web) for seed in range(CLIENTS)), watch(other))

    before = psutil.Process().memory_info().rss
    asyncio.run(crowd())
    served.wait_until_idle(60)
    assert served.worker.failure is None
    assert min(counts[kind] for kind in ("answered", "streamed", "left", "refused", "dropped")) >= 5, counts
    assert psutil.Process().memory_info().rss - before < 2**28
