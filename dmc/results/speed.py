"""How fast an engine feeds prompts and decodes behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmc.results.benchmark import seconds
from dmc.runtime import Engine, SamplingParams


@dataclass(frozen=True)
class Speed:
    """Tokens per second over all sequences together."""

    prefill: float
    """Of prompts, up to the first token of each."""
    decode: float
    """Of continuations, while all decode."""


def measure_speed(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Speed:
    """Feed prompts, then decode behind them.

    Args:
        engine: nothing else runs on it.
        prompts: as many as the engine takes at the same time, or fewer.
        new_tokens: steps of decoding that are timed, >= 1.
    """
    clock = _Clock(engine)
    requests = _submit(engine, prompts, max_new_tokens=1)
    while not all(request.generation for request in requests):
        clock.step()
    prefill = sum(map(len, prompts)) / clock.seconds
    # the first to be fed decode while the others are fed, which may take twice as many steps as without them
    requests = _submit(engine, prompts, max_new_tokens=2 * clock.steps + 2 + new_tokens)
    try:
        while not all(request.logprobs for request in requests):
            engine.step()
        engine.step()  # warm-up
        clock = _Clock(engine)
        for _ in range(new_tokens):
            clock.step()
    finally:
        for request in requests:
            engine.abort(request)
    return Speed(prefill, clock.new_tokens / clock.seconds)


def _submit(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> list[Any]:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return [engine.submit(prompt, params) for prompt in prompts]


@dataclass
class _Clock:
    engine: Engine
    steps: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    def step(self) -> None:
        events: list[Any] = []
        self.seconds += seconds(lambda: events.extend(self.engine.step()))
        self.steps += 1
        self.new_tokens += len(events)
