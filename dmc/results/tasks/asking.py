"""Ask about a prompt that the cache holds compressed: no token of an answer comes from the prompt's own pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from dmc.results.tasks.base import Sample
from dmc.runtime import Engine, Generation, SamplingParams

Question = Literal["known", "hidden"]
"""What a cache is compressed with: the whole question in sight, or the context alone."""


def check_question(question: str) -> None:
    """Raise a ValueError for what is no `Question`."""
    if question not in get_args(Question):
        raise ValueError(
            f"question={question!r}: expected known (the cache is compressed with the question in sight) or hidden "
            "(before it comes); its wording is question_text"
        )


def answers(engine: Engine, samples: Sequence[Sample], params: SamplingParams) -> list[Generation]:
    """Let the cache compress each prompt, feed what stands behind it, and continue."""
    sessions = [engine.session() for _ in samples]
    try:
        for sample, session in zip(samples, sessions, strict=True):
            session.feed(sample.prompt)
        pairs = zip(samples, sessions, strict=True)
        requests = [engine.submit(sample.after, params, session) for sample, session in pairs]
        engine.run(requests, progress=False)
        return [request.generation for request in requests if request.generation is not None]
    finally:
        for session in sessions:
            session.close()


def answer_scores(engine: Engine, samples: Sequence[Sample]) -> list[Tensor]:
    """Score the right answers, float32 [tokens, vocab], behind the compressed prompt and what is fed after it."""
    behind = [[*sample.after, *sample.continuation] for sample in samples]
    logprobs = engine.score([sample.prompt for sample in samples], behind)
    return [each[len(sample.after) :] for each, sample in zip(logprobs, samples, strict=True)]
