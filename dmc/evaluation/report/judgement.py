"""What is better, what is the same within noise, and what nothing else beats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from dmc.evaluation.report.findings import Result

STANDARD_ERRORS = 2
"""A difference within so many of its standard errors is called noise."""
HELD = 0.9
"""Share of the requested ratio from which on a budget counts as held."""


def badness(result: Result) -> float:
    """Return the quality turned so that less is better."""
    return -result.quality if result.higher_is_better else result.quality


def loss_over_full_cache(result: Result) -> float | None:
    """Return how much worse than the full cache a result is; None without a full cache on the same samples."""
    if result.over_full_cache is None:
        return None
    return -result.over_full_cache if result.higher_is_better else result.over_full_cache


def is_measurably_worse(result: Result) -> bool:
    """Whether a result is worse than the full cache by more than noise; without a standard error, at all."""
    lost = loss_over_full_cache(result)
    return lost is not None and lost > STANDARD_ERRORS * (result.over_full_cache_error or 0.0)


def is_tied(result: Result, best: Result) -> bool:
    """Whether two results differ by no more than noise: paired where their samples are the same."""
    if result.samples_key is not None and result.samples_key == best.samples_key:
        differences = [own - other for own, other in zip(result.sample_values, best.sample_values, strict=True)]
        if len(differences) < 2:
            return result.quality == best.quality
        error = statistics.stdev(differences) / math.sqrt(len(differences))
    else:
        error = math.hypot(result.quality_error or 0.0, best.quality_error or 0.0)
    return abs(result.quality - best.quality) <= STANDARD_ERRORS * error


def holds_budget(result: Result) -> bool:
    """Whether a result achieved the ratio that was asked for, or nearly so."""
    return result.achieved_ratio >= HELD * result.requested_ratio


def pareto_front(results: Sequence[Result], cost: Callable[[Result], float]) -> list[Result]:
    """Keep the results than which no other is both cheaper and as good, or better and as cheap; the cheapest first."""
    front: list[Result] = []
    for result in sorted(results, key=lambda each: (cost(each), badness(each))):
        if not front or badness(result) < badness(front[-1]):
            front.append(result)
    return front
