"""RoCo (arXiv:2402.06262): the entries that received little attention leave, unless their attention varies much."""

import math

from .base import GrowingMethod
from .choices import choose, highest


class RoCo(GrowingMethod):
    """Keeps the r + 1 entries whose attention deviates most, and of the others those with the highest mean.

    r = floor(recent_ratio b). The newest min(10, r + 1) entries held count as deviating without limit. Mean and
    deviation are over the queries that saw the entry, of the mean over the group.
    """

    def __init__(self, budget, recent_ratio=0.3):
        super().__init__(budget)
        self.recent_ratio = recent_ratio

    def keep(self, layer, head, budget, protected):
        entries = layer.heads[head]
        moments = [
            mean_and_deviation(entry.mean_received, float(entry.squared), entry.num_queries) for entry in entries
        ]
        num_safe = math.floor(self.recent_ratio * budget) + 1
        newest = len(entries) - min(10, num_safe)
        deviations = [math.inf if number >= newest else moments[number][1] for number in range(len(entries))]
        safe = highest(deviations, num_safe)
        return choose([mean for mean, _ in moments], budget, protected, safe)


def mean_and_deviation(total, total_of_squares, count):
    """Mean and standard deviation of `count` numbers from their sum and the sum of their squares."""
    mean = total / count
    return mean, math.sqrt(max(0.0, total_of_squares / count - mean**2))
