"""Questions about contexts that are read once: each goes on from a copy of what the cache has kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dmc.results.tasks.base import Sample, by_prompt
from dmc.runtime import Engine, Generation, SamplingParams
from dmc.runtime.generation import Scoring
from dmc.runtime.request import Keep, of_given_tokens
from dmc.runtime.session import FrozenSession

Answer = tuple[Generation, Tensor]
"""What a model generates, and the log-probabilities of the right answer's tokens, float32 [n]."""


def answers_of(engine: Engine, samples: Sequence[Sample], params: SamplingParams) -> list[Answer]:
    """Answer samples; each gets what it would get alone, whatever shares its prompt or runs beside it.

    A prompt is read and compressed once. A right answer that the model generates is not scored again.

    Args:
        engine: nothing runs on it.
        samples: with tokens to feed after each prompt; a right answer may be empty.
        params: sampling parameters of all answers.
    """
    found: dict[int, Answer] = {}
    for indices, contexts in _readings(engine, samples, params.max_new_tokens):
        chosen = [samples[index] for index in indices]
        found |= zip(indices, _answered(engine, chosen, contexts, params), strict=True)
    return [found[index] for index in range(len(samples))]


def scores_of(engine: Engine, samples: Sequence[Sample], keep: Keep) -> list[Scoring]:
    """Score the right answers of samples, each as if it were alone; a prompt is read and compressed once.

    Args:
        engine: nothing runs on it.
        samples: with tokens to feed after each prompt.
        keep: reduces the log-probabilities of a continuation, [n, vocab], to what is returned.
    """
    found: dict[int, Scoring] = {}
    for indices, contexts in _readings(engine, samples, max(len(sample.continuation) for sample in samples)):
        scorings = _scored(engine, [samples[index] for index in indices], contexts, keep)
        found |= zip(indices, scorings, strict=True)
    return [found[index] for index in range(len(samples))]


Context = FrozenSession | list[int]
"""What is kept of a prompt; or the prompt, where nothing can be shared: each question reads it again."""


def _readings(engine: Engine, samples: Sequence[Sample], new_tokens: int) -> Iterator[tuple[list[int], list[Context]]]:
    """Yield samples with their contexts, as many at a time as find a place; contexts are held until the next."""
    most = max(len(sample.prompt) + len(sample.after) for sample in samples) + new_tokens
    room = 2 * engine.cache.layout.most_blocks(most, engine.cache.block_size)
    if not (engine.cache.has_free(room) and (engine.policy is None or engine.policy.why_not_copied is None)):
        yield [*range(len(samples))], [sample.prompt for sample in samples]
        return
    waiting = deque(by_prompt(samples))
    while waiting:
        with ExitStack() as stack:
            asked: dict[int, Context] = {}
            while waiting and (
                not asked
                or (engine.cache.has_free(room) and len(asked) + len(waiting[0]) <= engine.cache.num_free_rows)
            ):
                indices = waiting.popleft()
                asked |= dict.fromkeys(indices, stack.enter_context(_read(engine, samples[indices[0]].prompt)))
            yield [*asked], [*asked.values()]


@contextmanager
def _read(engine: Engine, prompt: list[int]) -> Iterator[FrozenSession]:
    """Compress a prompt, and hold what is kept of it, without a row of the cache."""
    with engine.session() as session:
        session.feed(prompt)
        context = session.freeze()
    try:
        yield context
    finally:
        context.close()


def _answered(
    engine: Engine, samples: Sequence[Sample], contexts: Sequence[Context], params: SamplingParams
) -> list[Answer]:
    """Answer samples, all at the same time, each from its context; score the answers that are not the right ones."""
    with ExitStack() as stack:
        requests = []
        for sample, context in zip(samples, contexts, strict=True):
            if isinstance(context, list):
                requests.append(engine.submit(context, params, after=sample.after))
            else:
                requests.append(engine.submit(sample.after, params, stack.enter_context(context.session())))
        engine.run(requests, progress=False)
    generations = [request.generation for request in requests if request.generation is not None]
    known = [_given(sample, generation) for sample, generation in zip(samples, generations, strict=True)]
    left = [index for index, logprobs in enumerate(known) if logprobs is None]
    scorings = _scored(engine, [samples[index] for index in left], [contexts[index] for index in left], of_given_tokens)
    again = dict(zip(left, scorings, strict=True))
    return [
        (generation, again[index].logprobs if logprobs is None else logprobs)
        for index, (generation, logprobs) in enumerate(zip(generations, known, strict=True))
    ]


def _scored(engine: Engine, samples: Sequence[Sample], contexts: Sequence[Context], keep: Keep) -> list[Scoring]:
    right, after = [sample.continuation for sample in samples], [sample.after for sample in samples]
    with ExitStack() as stack:
        forks = [
            context if isinstance(context, list) else stack.enter_context(context.session()) for context in contexts
        ]
        return engine.score_with_stats(forks, right, keep, after)


def _given(sample: Sample, generation: Generation) -> Tensor | None:
    """Return the log-probabilities of the right answer if the model has given it; None: it has not."""
    count = len(sample.continuation)
    return torch.tensor(generation.logprobs[:count]) if generation.token_ids[:count] == sample.continuation else None
