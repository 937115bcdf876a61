"""TOVA (arXiv:2401.06104): what the newest query attends to least leaves."""

from .base import GrowingMethod
from .choices import choose


class TOVA(GrowingMethod):
    """Keeps the b(n) entries with the highest attention of the last query, its own entry a candidate.

    One set per layer by the mean over all query heads; `per_head` takes a set per KV head by the mean over its group.
    `protect_last` keeps the newest entry whatever it received.
    """

    def __init__(self, budget, per_head=False, protect_last=False):
        super().__init__(budget)
        self.per_head, self.protect_last = per_head, protect_last

    def keep(self, layer, head, budget, protected):
        rows = [layer.weights[head]] if self.per_head else layer.weights
        scores = (sum(row[:, -1].mean(0) for row in rows) / len(rows)).tolist()
        return choose(scores, budget, protected, {len(scores) - 1} if self.protect_last else ())
