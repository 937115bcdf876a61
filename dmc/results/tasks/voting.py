"""Several sampled continuations of one prompt: the answer by vote, and the memory of all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from dmc.config.settings import Count, checked_dataclass
from dmc.policies.reading import ReadingPolicy
from dmc.runtime import Engine, Generation, SamplingParams

Vote = Literal["majority", "first"]


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


def write_chains(engine: Engine, prompt: list[int], after: list[int], params: SamplingParams) -> Chains:
    """Continue one prompt `params.n` times; nothing else may run on the engine.

    Args:
        engine: an engine; of more chains than `max_batch_size` some wait for others.
        prompt: tokens that the cache compresses.
        after: tokens fed after that, not empty.
        params: sampling parameters of all chains.
    """
    request = engine.submit(prompt, params, after=after)
    cache, most = engine.cache, 0
    while request.generation is None:
        engine.step()
        running = engine.num_running
        most = max(
            most, cache.layout.ranks.all_reduce(engine.blocks_in_use * cache.block_bytes + running * cache.state_bytes)
        )
    engine.run([request])  # it has ended: raises the error, if there was one
    generations = [request.generation, *request.generation.alternatives]
    # of one that ends, the last step is not seen above
    most = max(most, *(generation.stats.peak_bytes_allocated for generation in generations))
    return Chains(generations, most, sum(bytes_read(engine, generation) for generation in generations))


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
