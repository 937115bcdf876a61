"""OmniKV (ICLR 2025): a few filter layers choose the prompt tokens that the layers after them read."""

import math

import torch

from .base import Method
from .choices import highest

WINDOW = 16


class OmniKV(Method):
    """Drops nothing; while decoding, a sparse layer reads the k = b(P) chosen prompt tokens and all generated ones.

    Full are the layers before the first filter layer, the filter layers, and the one after each. A sparse layer reads
    what the nearest filter layer before it chose in this step. Filter layers by default: 2, 8 and 18 of 32, scaled to
    the depth, floored, without repetition.

    A filter layer chooses by the attention of its newest query ("last"), or of its last 16 queries, prompt included
    ("uniform", "exponential"; fewer where there are not as many): each at its own position, its softmax over the
    prompt's keys up to its position only, the maximum over all query heads, summed with the weights of
    `selector_weights`. Tokens of the prompt still among the last 16 are candidates like any other.
    """

    def __init__(self, budget, filter_layers=None, selector="last"):
        super().__init__(budget)
        self.filter_layers, self.selector = filter_layers, selector
        self.window = 1 if selector == "last" else WINDOW
        self.queries = {}

    def attend_prompt(self, index, query, key, value, first):
        positions = range(query.shape[1])[-self.window :]
        self.queries[index] = [(place, self.decoder.rotate(query[:, place], place)) for place in positions]
        return super().attend_prompt(index, query, key, value, first)

    def read(self, layer, query):
        layers = filter_layers_of(len(self.layers)) if self.filter_layers is None else sorted(self.filter_layers)
        self.queries[layer.index] = [*self.queries[layer.index], (self.num_seen - 1, query)][-self.window :]
        if layer.index in layers:
            self.chosen = self.choose(layer)
        if is_full(layer.index, layers):
            return super().read(layer, query)
        return [[*self.chosen, *range(self.prompt_length, self.num_seen)] for _ in layer.heads]

    def choose(self, layer):
        """Ascending positions of the prompt's tokens that the sparse layers read."""
        weights = torch.stack([self.weigh(layer, *query) for query in self.queries[layer.index]], 1)
        scores = select_scores(weights.tolist(), selector_weights(weights.shape[1], self.selector))
        return highest(scores, self.limit(self.prompt_length))

    def weigh(self, layer, position, query):
        """Attention of one position's query heads to the prompt alone, [query_heads, prompt]."""
        rows = []
        for head, entries in enumerate(layer.heads):
            keys = torch.stack([entry.key for entry in entries[: self.prompt_length]])
            scores = self.queries_of(query, head) @ keys.T * self.decoder.scaling
            scores[:, position + 1 :] = -math.inf
            rows.append(scores.softmax(-1))
        return torch.cat(rows)


def filter_layers_of(num_layers):
    """Return the default filter layers of a model."""
    return sorted({num_layers * layer // 32 for layer in (2, 8, 18)})


def is_full(layer, filter_layers):
    """Whether a layer reads everything."""
    return layer < filter_layers[0] or layer in filter_layers or layer - 1 in filter_layers


def selector_weights(num_queries, selector):
    """Weights of the last queries, oldest first: the newest has 1/2 and each one before it half of that, or all 1."""
    if selector == "exponential":
        return [2.0 ** (number - num_queries) for number in range(num_queries)]
    return [1.0] * num_queries if selector == "uniform" else [0.0] * (num_queries - 1) + [1.0]


def select_scores(weights, selector):
    """Maximum over the heads of weights [heads, queries, keys], summed over the queries with the selector's weights."""
    num_queries, num_keys = len(weights[0]), len(weights[0][0])
    return [
        sum(selector[query] * max(of_head[query][key] for of_head in weights) for query in range(num_queries))
        for key in range(num_keys)
    ]
