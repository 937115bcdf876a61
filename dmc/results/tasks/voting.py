"""Several sampled continuations of one prompt: the answer by vote, and the memory of all of them together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from tqdm import tqdm

from dmc.config.settings import Count, checked_dataclass
from dmc.policies.reading import ReadingPolicy
from dmc.runtime import Engine, Generation, SamplingParams

Vote = Literal["majority", "first"]
Asked = tuple[list[int], list[int], SamplingParams]
"""A prompt, tokens fed after it, and parameters of its chains."""


@checked_dataclass(frozen=True, kw_only=True)
class VotingOptions:
    """How many chains a problem gets, and which of their answers counts."""

    chains: Count = 1
    """Number of continuations of a prompt, which is computed once; they run at the same time."""
    vote: Vote = "majority"
    """majority: the most frequent answer, of equally frequent ones that of the earliest chain; first: the answer of the
    chain that needs the fewest tokens, so that the others could stop. Chains without an answer do not vote."""

    def check_temperature(self, temperature: float) -> None:
        """Raise ValueError if several chains would be the same."""
        if self.chains > 1 and temperature == 0:
            raise ValueError(f"chains={self.chains}, temperature=0: greedy chains are the same; use a higher one")


@dataclass(frozen=True)
class Chains:
    """The continuations of one prompt."""

    generations: list[Generation]
    peak_bytes: int
    """Most bytes that all of them allocated at the same time, each page that they share counted once."""
    bytes_read: float
    """Bytes that all of them read, over all steps that predict a token."""


def write_chains(
    engine: Engine,
    prompts: Sequence[list[int]],
    after: Sequence[list[int]],
    params: Sequence[SamplingParams],
    progress: bool | None = False,
) -> list[Chains]:
    """Continue each prompt `n` times; nothing else may run.

    Prompts run together if all of their chains find place, whatever they keep: each costs what it costs alone.

    Args:
        engine: an engine; of more chains of a prompt than `max_batch_size` some wait for others.
        prompts: tokens that the cache compresses.
        after: tokens fed after each, not empty.
        params: sampling parameters of all chains of a prompt.
        progress: whether to show it; None: on a terminal.
    """
    waiting, found = deque(zip(prompts, after, params, strict=True)), list[Chains]()
    with tqdm(total=len(waiting), desc="prompts", disable=None if progress is None else not progress) as bar:
        while waiting:
            wave = [waiting.popleft()]
            while waiting and _find_place(engine, [*wave, waiting[0]]):
                wave.append(waiting.popleft())
            found += _write_wave(engine, wave)
            bar.update(len(wave))
    return found


def _find_place(engine: Engine, asked: list[Asked]) -> bool:
    """Return whether all chains do, if nothing is compressed: none waits, is preempted, or is computed again."""
    cache = engine.cache
    most = [
        params.n * cache.layout.most_blocks(len(prompt) + len(after) + params.max_new_tokens, cache.block_size)
        for prompt, after, params in asked
    ]
    return sum(params.n for *_, params in asked) <= cache.num_free_rows and cache.has_free(sum(most))


def _write_wave(engine: Engine, asked: list[Asked]) -> list[Chains]:
    requests = [engine.submit(prompt, params, after=after) for prompt, after, params in asked]
    most = [0] * len(requests)
    while any(request.generation is None for request in requests):
        engine.step()
        for number, request in enumerate(requests):
            if request.generation is not None or not request.alternatives:
                continue
            rows = [chain.sequence.row for chain in request.branches]
            most[number] = max(most[number], engine.cache.bytes_allocated(*(row for row in rows if row is not None)))
    engine.run(requests)  # they have ended: raises the error, if there was one
    chains = []
    for request, seen in zip(requests, most, strict=True):
        assert request.generation is not None
        generations = [request.generation, *request.generation.alternatives]
        # what one chain alone holds, and what it holds in its last step, is not seen above
        peak = max(seen, *(generation.stats.peak_bytes_allocated for generation in generations))
        chains.append(Chains(generations, peak, sum(bytes_read(engine, generation) for generation in generations)))
    return chains


def bytes_read(engine: Engine, generation: Generation) -> float:
    """Return the bytes that a continuation's steps have read: all that was held; of a reading policy, its budget."""
    stats, policy = generation.stats, engine.policy
    held = stats.mean_bytes_allocated * len(generation.token_ids)
    if not isinstance(policy, ReadingPolicy):
        return held
    return held * min(1.0, policy.budget.entries(round(stats.mean_tokens_seen)) / stats.mean_tokens_seen)


def voted(answers: Sequence[str | None], vote: Vote, lengths: Sequence[int]) -> str | None:
    """Choose one of several answers; None: there is none.

    Args:
        answers: answer of each chain, None for one that has not come to any.
        vote: see `VotingOptions`.
        lengths: tokens of each chain.
    """
    given = [(answer, length) for answer, length in zip(answers, lengths, strict=True) if answer is not None]
    if not given:
        return None
    if vote == "first":
        return min(given, key=lambda pair: pair[1])[0]
    return Counter(answer for answer, _ in given).most_common(1)[0][0]  # in the order of the first of each


def vote_metrics(answers: Sequence[str | None], right: Sequence[bool], chosen_right: bool) -> dict[str, float]:
    """Return the metrics of a problem: of the vote, of a single chain, and of the best choice among them."""
    return {
        "exact_match": float(chosen_right),
        "single_chain": fmean(map(float, right)),
        "any_chain": float(any(right)),
        "answered": fmean(float(answer is not None) for answer in answers),
    }
