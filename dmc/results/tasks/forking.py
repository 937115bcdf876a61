"""Questions about contexts that are read once: each goes on from a copy of what the cache has kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dmc.results.tasks.base import Sample
from dmc.runtime import Engine, Generation, SamplingParams
from dmc.runtime.request import of_given_tokens
from dmc.runtime.session import FrozenSession

Answer = tuple[Generation, Tensor]
"""What a model generates, and the log-probabilities of the right answer's tokens, float32 [n]."""


def answers_of(engine: Engine, samples: Sequence[Sample], params: SamplingParams) -> list[Answer]:
    """Answer samples; each gets what it would get alone, whatever shares its prompt or runs beside it.

    A prompt is read and compressed once. A right answer that the model generates is not scored again.

    Args:
        engine: nothing runs on it.
        samples: with tokens to feed after each prompt.
        params: sampling parameters of all answers.
    """
    most = max(len(sample.prompt) + len(sample.after) for sample in samples) + params.max_new_tokens
    room = 2 * engine.cache.layout.most_blocks(most, engine.cache.block_size)
    if not (engine.cache.has_free(room) and (engine.policy is None or engine.policy.why_not_copied is None)):
        return _alone(engine, samples, params)
    waiting = by_prompt(samples)
    found: dict[int, Answer] = {}
    while waiting:
        with ExitStack() as stack:
            asked: dict[int, FrozenSession] = {}
            while waiting and (not asked or (engine.cache.has_free(room) and _fits(engine, asked, waiting[0]))):
                indices = waiting.pop(0)
                context = stack.enter_context(_read(engine, samples[indices[0]].prompt))
                asked |= dict.fromkeys(indices, context)
            chosen = [samples[index] for index in asked]
            found |= zip(asked, _from(engine, chosen, [*asked.values()], params), strict=True)
    return [found[index] for index in range(len(samples))]


def by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of samples with the same prompt, in the order of their first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(tuple(sample.prompt), []).append(index)
    return [*groups.values()]


def _fits(engine: Engine, asked: dict[int, FrozenSession], more: list[int]) -> bool:
    """Return whether more questions find a place beside those asked; else their contexts would wait in memory."""
    return len(asked) + len(more) <= engine.cache.num_free_rows


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


def _from(
    engine: Engine, samples: Sequence[Sample], contexts: Sequence[FrozenSession], params: SamplingParams
) -> list[Answer]:
    """Answer samples, all at the same time, each from a context that was read before."""
    with ExitStack() as stack:
        both = [*zip(samples, contexts, strict=True)]
        requests = [
            engine.submit(sample.after, params, stack.enter_context(context.session())) for sample, context in both
        ]
        engine.run(requests, progress=False)
    generations = [request.generation for request in requests if request.generation is not None]
    known = [_given(sample, generation) for sample, generation in zip(samples, generations, strict=True)]
    with ExitStack() as stack:
        left = [pair for pair, logprobs in zip(both, known, strict=True) if logprobs is None]
        forks = [stack.enter_context(context.session()) for _, context in left]
        right, after = [sample.continuation for sample, _ in left], [sample.after for sample, _ in left]
        scorings = iter(engine.score_with_stats(forks, right, of_given_tokens, after))
    return [
        (generation, next(scorings).logprobs if logprobs is None else logprobs)
        for generation, logprobs in zip(generations, known, strict=True)
    ]


def _given(sample: Sample, generation: Generation) -> Tensor | None:
    """Return the log-probabilities of the right answer if the model has given it; None: it has not."""
    count = len(sample.continuation)
    return torch.tensor(generation.logprobs[:count]) if generation.token_ids[:count] == sample.continuation else None


def _alone(engine: Engine, samples: Sequence[Sample], params: SamplingParams) -> list[Answer]:
    """Answer samples, each from its own cache, of a policy that keeps a part of its state outside of it."""
    prompts, after = [sample.prompt for sample in samples], [sample.after for sample in samples]
    generations = engine.generate(prompts, params, progress=False, after=after)
    right = [sample.continuation for sample in samples]
    scorings = engine.score_with_stats(prompts, right, of_given_tokens, after)
    return [(generation, scoring.logprobs) for generation, scoring in zip(generations, scorings, strict=True)]
