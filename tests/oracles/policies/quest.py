"""Quest (arXiv:2406.10774): a query reads the pages of keys whose bounds promise the highest scores."""

import torch

from .base import Method
from .choices import highest


class Quest(Method):
    """Drops nothing; a decode step reads max(1, floor(b(P) / page_size)) pages per KV head.

    Page p holds positions p * page_size to (p + 1) * page_size - 1, so the newest may be partly filled; its bounds are
    those of the keys it has, the new one included. The newest token's page is read and counts as one. Pages rank by
    the sum of `upper_bound` over the group's query heads; the earlier page among equals. The first `dense_layers`
    layers read all, and so does every layer while there are at most b(P) tokens. The prompt attends in full.
    """

    def __init__(self, budget, page_size=16, dense_layers=2):
        super().__init__(budget)
        self.page_size, self.dense_layers = page_size, dense_layers

    def read(self, layer, query):
        budget = self.limit(self.prompt_length)
        if layer.index < self.dense_layers or self.num_seen <= budget:
            return super().read(layer, query)
        num_pages = max(1, budget // self.page_size)
        chosen = []
        for head, entries in enumerate(layer.heads):
            starts = range(0, len(entries), self.page_size)
            bounds = [
                self.bound(entries[start : start + self.page_size], self.queries_of(query, head)) for start in starts
            ]
            pages = [*highest(bounds[:-1], num_pages - 1), len(bounds) - 1]
            chosen.append([number for number in range(len(entries)) if number // self.page_size in pages])
        return chosen

    @staticmethod
    def bound(page, queries):
        """Sum over the query heads of a page's upper bounds."""
        keys = torch.stack([entry.key for entry in page])
        lowest, largest = keys.amin(0).tolist(), keys.amax(0).tolist()
        return sum(upper_bound(query, lowest, largest) for query in queries.tolist())


def upper_bound(query, lowest, largest):
    """Highest product that a query can have with a key between two corners."""
    return sum(max(q * low, q * high) for q, low, high in zip(query, lowest, largest, strict=True))
