"""How sure the difference of two methods is that have answered the same questions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Groups = Sequence[Sequence[float]]
"""A figure's values: for each task its samples'; the figure is the mean of the tasks' means."""


def paired_error(own: Groups, other: Groups) -> float | None:
    """Return the standard error of the difference of two figures, paired sample by sample.

    Answers that are right or wrong and agree everywhere may still differ on the next: of n such pairs 3 in n at most,
    at 95 %, so that two standard errors are never less.

    Args:
        own: of one method.
        other: of another, the same samples in the same order.
    Returns:
        None where it is unknown: a task has one sample, or none.
    """
    errors = []
    for mine, theirs in zip(own, other, strict=True):
        if len(mine) < 2:
            return None
        differences = [value - beside for value, beside in zip(mine, theirs, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        if {*mine, *theirs} <= {0.0, 1.0}:
            error = max(error, 1.5 / len(differences))
        errors.append(error)
    return math.hypot(*errors) / len(errors) if errors else None
