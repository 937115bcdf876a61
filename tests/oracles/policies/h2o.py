"""H2O (arXiv:2306.14048), and what builds on it: VATP (arXiv:2406.12335) and CaM."""

from .base import GrowingMethod
from .choices import heavy_and_recent


class H2O(GrowingMethod):
    """The last r entries held and the heavy hitters before them, by the attention received since the prompt.

    r = ceil(b / 2), or min(recent, b). `reduce` is over the group's query heads. `normalize` divides by the number of
    queries that saw the entry (n - position).
    """

    num_sinks = 0

    def __init__(self, budget, recent=None, reduce="mean", normalize=False):
        super().__init__(budget)
        self.recent, self.reduce, self.normalize = recent, reduce, normalize

    def score(self, entry):
        received = entry.received.max() if self.reduce == "max" else entry.received.mean()
        return float(received) / (entry.num_queries if self.normalize else 1)

    def keep(self, layer, head, budget, protected):
        recent = -(-budget // 2) if self.recent is None else min(self.recent, budget)
        scores = [self.score(entry) for entry in layer.heads[head]]
        return heavy_and_recent(scores, budget - recent, recent, min(self.num_sinks, budget - recent), protected)


class VATP(H2O):
    """H2O with each score times the L1 norm of the entry's own value; the first entries held are kept as sinks.

    The sinks, min(sinks, heavy), are part of the heavy half.
    """

    def __init__(self, budget, sinks=4):
        super().__init__(budget)
        self.num_sinks = sinks

    def score(self, entry):
        return value_aware(entry.mean_received, entry.value.tolist())


class CaM(H2O):
    """H2O whose evicted values are spread over the kept entries right after them (in expectation, not sampled)."""

    def __init__(self, budget, m=32, expectation=True):
        if not expectation:
            raise ValueError("the oracle of CaM has no random numbers: expectation=True")
        super().__init__(budget)
        self.m = m

    def keep(self, layer, head, budget, protected):
        entries, kept = layer.heads[head], super().keep(layer, head, budget, protected)
        added = []
        for number in sorted(set(range(len(entries))) - set(kept)):
            targets = [entries[index] for index in kept if index > number][: self.m]
            received = entries[number].mean_received
            probability = merge_probability(received, [target.mean_received for target in targets])
            share = entries[number].value * probability / len(targets)
            added += [(target, share) for target in targets]
        for target, share in added:
            target.value = target.value + share
        return kept


def value_aware(score, value):
    """Score of an entry times the L1 norm of its value."""
    return score * sum(abs(number) for number in value)


def merge_probability(received, targets):
    """Attention an evicted entry has received over the mean of its targets', clamped to [0, 1]."""
    return min(1.0, max(0.0, received * len(targets) / sum(targets)))
