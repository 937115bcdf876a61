"""Estimates of means and differences, with the bounds that samples, contexts and seeds allow.

* Samples of one context (a file, a text) and models of one seed are no independent evidence: errors are clustered by
  both. Bounds are Student's: of the contexts' part with their degrees of freedom, of the seeds' part with theirs.
* "worse" and "as good" are claims at 95 % each: the difference's lower bound is above 0, or its upper bound within the
  margin. All else is "unknown", and so is everything whose spread is: one sample, one context. Of n contexts whose
  answers agree 3 in n may still be lost wholly, so that "as good" needs 3 / margin contexts; see `UNSEEN`.
* What is chosen on these data, the best of k, has bounds of 1 - 0.05 / k.
* The margin that samples carry is the distance of a bound from the mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
"""Confidence of each bound, one-sided."""
UNSEEN = 3.0
"""Answers: of n contexts so many may be lost wholly although none is seen to be: exp(-3) is 0.05."""
SKEW = 2 / 3
"""Share of these that a Student's bound lacks where some are seen: rare losses are skewed (Poisson's bounds of 1 and 2
lost contexts are 4.7 and 6.3)."""
MOST_CONTEXTS = 10**9
"""More are not proposed."""
POWER = 0.8
"""Chance that as many contexts as a claim is said to need show it, if the difference is as measured."""
Standing = Literal["as good", "worse", "unknown", ""]
Seeds = Sequence[Sequence[float]] | numpy.ndarray
"""Values of samples by seed; all seeds have the same samples."""


@dataclass(frozen=True)
class Estimate:
    """A mean over samples and seeds, with the bounds of its loss."""

    value: float
    """The mean; NaN: there is nothing to compare with."""
    variance: float = math.nan
    """Variance of the mean over contexts; NaN: unknown, nothing can be claimed."""
    degrees: float = math.inf
    """Degrees of freedom of that variance."""
    floor: float = 0.0
    """Least distance of the bounds, for contexts unlike the sampled ones."""
    num_contexts: int = 0
    by_seed: tuple[float, ...] = ()
    """Mean of each seed."""

    @property
    def variance_of_seeds(self) -> float:
        """Variance of the mean over seeds; 0 for a single one."""
        return float(numpy.var(self.by_seed, ddof=1)) / len(self.by_seed) if len(self.by_seed) > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error; NaN: unknown."""
        return math.sqrt(self.variance + self.variance_of_seeds)

    @property
    def reach(self) -> float:
        """Distance between the value and its bounds: the margin that the samples carry; infinite: none."""
        return self.reach_of_best(1)

    def reach_of_best(self, num: int) -> float:
        """Return the reach if this is the best of several, chosen on these data (Bonferroni).

        Each variance is stretched by its own quantile: one of their sum is too small where two seeds happen to be
        alike.
        """
        if math.isnan(self.variance):
            return math.inf
        miss = (1 - CONFIDENCE) / num
        floor = self.floor * math.log(miss) / math.log(1 - CONFIDENCE)
        of_contexts = max(floor, _quantile(self.degrees, miss) * math.sqrt(self.variance) + SKEW * floor)
        seeds = len(self.by_seed)
        of_seeds = _quantile(seeds - 1, miss) ** 2 * self.variance_of_seeds if self.variance_of_seeds else 0.0
        return math.sqrt(of_contexts**2 + of_seeds)

    @property
    def lower(self) -> float:
        """Lower bound with 95 % confidence."""
        return self.value - self.reach

    @property
    def upper(self) -> float:
        """Upper bound with 95 % confidence."""
        return self.value + self.reach

    @property
    def num_seeds_above(self) -> int:
        """Number of seeds whose mean is above 0."""
        return sum(mean > 0 for mean in self.by_seed)

    def standing(self, margin: float) -> Standing:
        """Return what a loss shows: "as good" up to the margin, "worse", "unknown", or "" without a value."""
        if math.isnan(self.value):
            return ""
        if self.upper <= margin:
            return "as good" if math.isfinite(self.reach) else "unknown"
        return "worse" if self.lower > 0 else "unknown"

    def contexts_needed(self, margin: float, power: float = 0.5) -> int | None:
        """Return the contexts that would carry a margin at this spread, with this chance.

        None: the spread is unknown, or that of the seeds alone is too large.
        """
        chance = float(ndtri(power))

        def is_enough(found: Estimate) -> bool:
            return found.reach + chance * found.error <= margin

        def scaled(contexts: int) -> Estimate:
            more = contexts / self.num_contexts
            degrees = max(1.0, (self.degrees + 1) * more - 1)
            return replace(self, variance=self.variance / more, degrees=degrees, floor=self.floor / more)

        if math.isinf(self.reach) or margin <= 0 or not is_enough(replace(self, variance=0.0, floor=0.0)):
            return None
        most = 2
        while not is_enough(scaled(most)):
            if most > MOST_CONTEXTS:
                return None
            most *= 2
        return bisect_left(range(most), True, lo=2, key=lambda contexts: is_enough(scaled(contexts)))


def _quantile(degrees: float, miss: float) -> float:
    return float(-stdtrit(degrees, miss))


def estimate(values: Seeds, contexts: Sequence[Any] = (), are_answers: bool = False) -> Estimate:
    """Estimate a mean, its error clustered by context and by seed.

    The two variances are added, which counts the variance within a context and seed twice: with few seeds this is
    conservative.

    Args:
        values: see `Seeds`.
        contexts: context of each sample; empty: each sample has its own.
        are_answers: whether they are (differences of) scores from 0 to 1, such as right or wrong answers, whose rare
            losses a few contexts need not show: see `UNSEEN`.
    """
    found = numpy.asarray(values, dtype=float)
    mean, by_seed, samples = float(found.mean()), tuple(found.mean(1).tolist()), found.shape[1]
    members = numpy.unique([repr(context) for context in contexts or range(samples)], return_inverse=True)[1]
    sizes = numpy.bincount(members)
    num = len(sizes)
    if num < 2:
        return Estimate(mean, num_contexts=num, by_seed=by_seed)
    parts = numpy.bincount(members, found.mean(0) - mean) / (samples - sizes)  # without each context: the jackknife
    variance = (num - 1) / num * float(parts @ parts)
    degrees = max(1.0, samples**2 / float(sizes @ sizes) - 1)  # uneven contexts count as fewer even ones
    return Estimate(mean, variance, degrees, UNSEEN / num if are_answers else 0.0, num, by_seed)


def difference(values: Seeds, other: Seeds, contexts: Sequence[Any] = (), higher_is_better: bool = False) -> Estimate:
    """Estimate how much worse `values` are than `other`, paired by sample and seed.

    Scores from 0 to 1 for which higher is better are answers: see `estimate`.
    """
    both = numpy.asarray([values, other], dtype=float)
    if not higher_is_better:
        return estimate(both[0] - both[1], contexts)
    return estimate(both[1] - both[0], contexts, are_answers=bool(((both >= 0) & (both <= 1)).all()))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Average the estimates of several tasks, which share seeds but no contexts.

    What no context shows may all be in the task with the highest floor.
    """
    num, seeds = len(estimates), [part.by_seed for part in estimates]
    if num == 1:
        return estimates[0]
    value = math.fsum(part.value for part in estimates) / num
    by_seed = tuple(numpy.mean(seeds, axis=0).tolist()) if len({*map(len, seeds)}) == 1 else ()
    parts = [(part.variance, part.degrees) if by_seed else _of_error(part) for part in estimates]
    total = sum(variance for variance, _ in parts)
    below = sum(variance**2 / degrees for variance, degrees in parts)
    floor, contexts = max(part.floor for part in estimates) / num, sum(part.num_contexts for part in estimates)
    return Estimate(value, total / num**2, total**2 / below if below else math.inf, floor, contexts, by_seed)


def _of_error(part: Estimate) -> tuple[float, float]:
    """Return the variance of contexts and seeds together, and the fewer degrees of freedom of the two."""
    seeds = len(part.by_seed)
    return part.error**2, min(part.degrees, seeds - 1) if seeds > 1 else part.degrees
