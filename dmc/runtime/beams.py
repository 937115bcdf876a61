"""Beam search: how the most likely continuations of a prompt go on, which have ended, and when none can be better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dmc.runtime.generation import GenerationStats, Step
from dmc.runtime.sampling import SamplingParams


class Extension(NamedTuple):
    """A beam with one more token."""

    beam: int
    """Index of the beam."""
    step: Step
    total: float
    """Sum of the log-probabilities of all tokens, this one's included."""


@dataclass
class Ended:
    """A continuation that cannot go on."""

    score: float
    steps: list[Step]
    stats: GenerationStats


@dataclass
class BeamSearch:
    """What the beams of a prompt have found; beams and ends are those of transformers with `early_stopping=False`.

    An end counts where it is among the `beam_width` best extensions of all beams. The search is over when as many have
    ended and the best of the others, divided by its length as it is now, is no better than the worst of them.
    """

    params: SamplingParams
    likely: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """The most likely next tokens of beams and their log-probabilities, by the beam's index, until all are known."""
    ended: list[Ended] = field(default_factory=list)
    """The best so far, best first."""

    def extend(self, beams: Sequence[list[float]]) -> tuple[list[Extension], list[Extension]]:
        """Choose among the extensions of all beams, given the log-probabilities of their tokens.

        Returns:
            The `beam_width` best that go on, fewer only at the maximum length, and those of the best that end here.
        """
        width, found = self.params.beam_width, []
        for index, logprobs in enumerate(beams):
            before, likely = math.fsum(logprobs), self.likely[index]
            top = dict(likely[: self.params.top_logprobs])
            found += [Extension(index, (token, logprob, top), before + logprob) for token, logprob in likely]
        found.sort(key=lambda each: each.total, reverse=True)
        self.likely = {}
        ends = self.params.stop_token_ids if len(beams[0]) + 1 < self.params.max_new_tokens else None
        going_on = [each for each in found if ends is not None and each.step[0] not in ends]
        return going_on[:width], [each for each in found[:width] if ends is None or each.step[0] in ends]

    def score(self, total: float, length: int) -> float:
        """Rank a continuation, by the sum of its tokens' log-probabilities and their number."""
        return total / length**self.params.length_penalty

    def end(self, extension: Extension, steps: list[Step], stats: GenerationStats) -> None:
        """Take in a continuation that ends, of which `steps` come before the extension's."""
        score = self.score(extension.total, len(steps) + 1)
        self.ended.append(Ended(score, [*steps, extension.step], stats))
        self.ended.sort(key=lambda each: each.score, reverse=True)
        del self.ended[self.params.beam_width :]

    def is_over(self, going_on: list[Extension], length: int) -> bool:
        """Whether none of the extensions, of `length` tokens each, best first, can still count."""
        if len(self.ended) < (self.params.beam_width or 0):
            return not going_on
        return not going_on or self.score(going_on[0].total, length) <= self.ended[-1].score
