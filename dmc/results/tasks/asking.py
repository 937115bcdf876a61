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


def answers(
    engine: Engine, samples: Sequence[Sample], params: SamplingParams | Sequence[SamplingParams]
) -> list[Generation]:
    """Let the cache compress each prompt, feed what stands behind it, and continue; all samples at the same time."""
    each_params = [params] * len(samples) if isinstance(params, SamplingParams) else params
    sessions = [engine.session() for _ in samples]
    try:
        for sample, session in zip(samples, sessions, strict=True):
            if sample.prompt:
                session.feed(sample.prompt)
        turns = zip(samples, each_params, sessions, strict=True)
        requests = [engine.submit(sample.after, own, session) for sample, own, session in turns]
        engine.run(requests, progress=False)
        return [request.generation for request in requests if request.generation is not None]
    finally:
        for session in sessions:
            session.close()


def answer_scores(engine: Engine, samples: Sequence[Sample]) -> list[Tensor]:
    """Score the right answers, float32 [tokens, vocab], fed as `answers` feeds: behind the compressed prompt."""
    prompts, continuations = [each.prompt for each in samples], [each.continuation for each in samples]
    scorings = engine.score_with_stats(prompts, continuations, after=[sample.after for sample in samples])
    return [scoring.logprobs for scoring in scorings]
