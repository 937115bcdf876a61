"""Clients that break off, drop their connection or send nonsense."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx


def test_clients_that_go_away_or_send_nonsense_leave_nothing_behind(served):
    """Every answer that is read to its end is the one that the prompt gets alone."""
    prompts = [[index + 1, 2, 3] for index in range(4)]
    counts: dict[str, int] = {"answered": 0, "left": 0, "dropped": 0, "refused": 0}

    async def visit(client: httpx.AsyncClient, expected: list[str], draw: random.Random) -> None:
        for _ in range(6):
            number, kind = draw.randrange(len(prompts)), draw.choice([*counts])
            body: dict[str, Any] = {"model": "own", "prompt": prompts[number], "max_tokens": 30, "temperature": 0}
            if kind == "refused":
                answer = await client.post("/v1/completions", json={"prompt": [1.5]})
                assert answer.status_code == 400
            elif kind == "answered":
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["choices"][0]["text"] == expected[number]
            elif kind == "left":
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                    await anext(answer.aiter_lines())
            else:
                try:
                    await client.post("/v1/completions", json=body, timeout=0.02)
                except httpx.TimeoutException:
                    pass
            counts[kind] += 1

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            bodies = [{"model": "own", "prompt": prompt, "max_tokens": 30, "temperature": 0} for prompt in prompts]
            answers = [await client.post("/v1/completions", json=body) for body in bodies]
            expected = [answer.json()["choices"][0]["text"] for answer in answers]
            await asyncio.gather(*(visit(client, expected, random.Random(seed)) for seed in range(16)))
            assert (await client.get("/health")).is_success

    asyncio.run(crowd())
    assert min(counts.values()) >= 5
    served.wait_until_idle(60)
    assert served.worker.failure is None
