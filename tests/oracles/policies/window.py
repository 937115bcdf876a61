"""Local window and StreamingLLM (arXiv:2309.17453): the first T and the last b(n) - T entries."""

from .base import GrowingMethod
from .choices import choose


class StreamingLLM(GrowingMethod):
    """T = min(sinks, b - 1); "first" and "last" are among the entries held.

    With `rerotate`, in every decode step the entries (the new one included, before eviction) sit at positions 0, 1, ...
    of the cache, and the query at the last of them; the prompt is encoded at its own positions.
    """

    def __init__(self, budget, sinks=4, rerotate=False):
        super().__init__(budget)
        self.sinks, self.rerotate = sinks, rerotate

    def keep(self, layer, head, budget, protected):
        return sinks_and_last(len(layer.heads[head]), budget, self.sinks, protected)

    def place(self, layer):
        if not self.rerotate:
            return super().place(layer)
        for entries in layer.heads:
            for index, entry in enumerate(entries):
                entry.key = self.decoder.rotate(entry.raw_key, index)
        return len(layer.heads[0]) - 1


class LocalWindow(StreamingLLM):
    """The last b(n) entries."""

    def __init__(self, budget):
        super().__init__(budget, sinks=0)


def sinks_and_last(num_entries, budget, sinks, protected=()):
    """Indices of the first min(sinks, budget - 1) entries and of the last ones, `budget` in all."""
    return choose(range(num_entries), budget, protected, range(min(sinks, budget - 1)))
