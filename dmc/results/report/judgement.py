"""What is better, what is the same within noise, and what nothing else beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from dmc.results.paired import paired_error
from dmc.results.report.findings import Result

STANDARD_ERRORS = 2
"""A difference within so many of its standard errors is called noise."""
MARGIN = 0.02
"""What may be lost and still count as as good: nats per token, or of the answers; of figures above 1 this share."""
FLOOR = 5 * MARGIN
"""What the full cache must answer, or a cache that answers nothing would lose no more than the margin."""
HELD = 0.9
"""Share of the requested ratio from which on a budget counts as held."""
Standing = Literal["as good", "worse", "unknown"]


def badness(result: Result) -> float:
    """Return the quality turned so that less is better."""
    return -result.quality if result.higher_is_better else result.quality


def loss_over_full_cache(result: Result) -> float | None:
    """Return how much worse than the full cache a result is; None without a full cache on the same samples."""
    if result.over_full_cache is None:
        return None
    return -result.over_full_cache if result.higher_is_better else result.over_full_cache


def margin_of(result: Result) -> float:
    """Return what a result may lose against the full cache, in its metric."""
    full = result.quality - (result.over_full_cache or 0.0)
    return MARGIN if result.metric == "loss" else MARGIN * max(1.0, abs(full))


def standing(result: Result) -> Standing:
    """Compare a result with the full cache: as good if noise and all it loses no more than the margin.

    Returns:
        "unknown" where the samples are too few to tell, or nothing says how far they are to be trusted.
    """
    lost, error = loss_over_full_cache(result), result.over_full_cache_error
    if lost is None or error is None:
        return "unknown"
    if lost + STANDARD_ERRORS * error <= margin_of(result):
        return "as good"
    return "worse" if lost > STANDARD_ERRORS * error else "unknown"


def is_tied(result: Result, best: Result) -> bool | None:
    """Whether two results differ by no more than noise: paired where their samples are the same.

    Returns:
        None where nothing says how large the noise is.
    """
    if result.samples_key is None or best.samples_key is None:
        return None
    if result.samples_key == best.samples_key:
        error = paired_error(result.groups, best.groups)
    elif result.quality_error is None or best.quality_error is None:
        error = None
    else:
        error = math.hypot(result.quality_error, best.quality_error)
    return None if error is None else abs(result.quality - best.quality) <= STANDARD_ERRORS * error


def holds_budget(result: Result) -> bool:
    """Whether a result achieved the ratio that was asked for, or nearly so."""
    return result.achieved_ratio >= HELD * result.requested_ratio


def tells_apart(results: Sequence[Result]) -> bool:
    """Whether a task can tell methods apart: not all have one figure, and the full cache answers more than a few."""
    full = [result for result in results if result.is_full]
    fails = bool(full) and all(result.higher_is_better and result.quality <= FLOOR for result in full)
    return not fails and len({result.quality for result in results}) > 1


def pareto_front(results: Sequence[Result], cost: Callable[[Result], float]) -> list[Result]:
    """Keep the results than which no other is both cheaper and as good, or better and as cheap; the cheapest first."""
    front: list[Result] = []
    for result in sorted(results, key=lambda each: (cost(each), badness(each))):
        if not front or badness(result) < badness(front[-1]):
            front.append(result)
    return front
