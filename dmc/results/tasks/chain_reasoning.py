"""Problems that are solved step by step: the cache compresses what the model writes, and the answer is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from pydantic import Field, StrictFloat, StrictInt

from dmc.config.settings import Count, checked_dataclass
from dmc.data import Problem, answer_of, draw_problem
from dmc.data.chains import MOST_LINES, Forms
from dmc.data.code import Split
from dmc.results.tasks.base import Breakdown, Counts, Sample, SampleResult, Task
from dmc.results.tasks.prompts import Encoder
from dmc.results.tasks.voting import Chains, VotingOptions, vote_metrics, voted, write_chains
from dmc.runtime import Engine, SamplingParams


@dataclass(frozen=True)
class ProblemSample(Sample):
    """A problem, with what its answer is checked by."""

    problem: Problem = field(kw_only=True)


@checked_dataclass(frozen=True, kw_only=True)
class ChainReasoning(VotingOptions, Task):
    """Asks for solutions of the problems of `dmc.data.chains`, several to a problem, and votes.

    The problem is compressed without its last token, so that no token of a solution is predicted by the prompt's own
    pass. Forms are such as no training shows. A row has the grid `by_lines`.

    Metrics: `exact_match`, the vote is right; `single_chain`, the share of right chains; `any_chain`, one of them is
    right; `answered`, the share of chains that come to an answer in time; `chain_tokens`, their mean length;
    `peak_bytes` of all chains of a problem together, `bytes_read` over all their steps. Bytes per token, and the ratio,
    are means over the chains.

    Raises:
        ValueError: a value is out of range.
    """

    main_metric = "exact_match"
    higher_is_better = True

    lines: Counts = (28,)
    """Numbers of lines of the programs; a line has 15 tokens of the solution."""
    problems: Count = 64
    """Number of problems of each size."""
    forms: Forms = "unseen"
    """Whether problems are written in forms that occur in training."""
    split: Split = "test"
    """Split of the problems; choices are made on `validation`."""
    max_new_tokens: Count = 600
    """Tokens of a chain at the most: one that has not come to an answer by then has none."""
    temperature: Annotated[StrictFloat, Field(ge=0, le=100)] = 1.0
    """Of the sampling; 0 is greedy, for one chain."""
    seed: StrictInt = 0

    def __post_init__(self) -> None:
        self.check_temperature(self.temperature)
        for size in self.lines:
            if not 1 <= size <= MOST_LINES:
                raise ValueError(f"lines={list(self.lines)}: expected numbers from 1 to {MOST_LINES}")

    def samples(self, tokenizer: Any, vocab_size: int) -> list[Sample]:
        """See `Task.samples`."""
        encoder = Encoder(tokenizer)
        samples: list[Sample] = []
        for size in self.lines:
            for number in range(self.problems):
                draw = np.random.default_rng([self.seed, size, number])
                problem = draw_problem(size, draw, self.split, self.forms)
                tokens = [*encoder.begin, *encoder.encode(problem.prompt)]
                answer = encoder.encode(problem.answer)
                place = {"lines": float(size)}
                samples.append(ProblemSample(tokens[:-1], answer, place, tokens[-1:], len(samples), problem=problem))
        return samples

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`."""
        params = [self._params(sample) for sample in samples]
        prompts, after = [sample.prompt for sample in samples], [sample.after for sample in samples]
        chains = write_chains(engine, prompts, after, params)
        return [self._result(sample, found) for sample, found in zip(samples, chains, strict=True)]

    def _params(self, sample: Sample) -> SamplingParams:
        """Return parameters with a seed for each problem; each chain's is one higher than the one's before it."""
        seed = int(np.random.SeedSequence([self.seed, sample.context]).generate_state(1, np.uint32)[0])
        temperature, length = self.temperature, self.max_new_tokens
        return SamplingParams(max_new_tokens=length, temperature=temperature, seed=seed << 16, n=self.chains)

    def _result(self, sample: Sample, chains: Chains) -> SampleResult:
        assert isinstance(sample, ProblemSample)
        texts = [generation.text or "" for generation in chains.generations]
        lengths = [len(generation.token_ids) for generation in chains.generations]
        answers = [answer_of(text) for text in texts]
        chosen = voted(answers, self.vote, lengths)
        metrics = vote_metrics(
            answers,
            [answer == sample.problem.answer for answer in answers],
            chosen == sample.problem.answer,
        )
        memory = {"peak_bytes": float(chains.peak_bytes), "bytes_read": chains.bytes_read}
        metrics |= {"chain_tokens": fmean(lengths), **memory}
        first, *others = (generation.stats for generation in chains.generations)
        return SampleResult(metrics, first, [Breakdown(sample.coordinates, metrics)], others)
