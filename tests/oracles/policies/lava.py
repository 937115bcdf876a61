"""LAVa (arXiv:2509.09754): attention times the largest value, pooled over a layer's heads, entropy over the layers."""

import math

from .choices import pool, share_out
from .snapkv import WindowMethod, pyramid_budgets


class LAVa(WindowMethod):
    """Each layer gets a share of the entries by the entropy of its scores, and its heads compete for them.

    layer_budget: "entropy"; "uniform" (C - w per head everywhere); "pyramid" (PyramidKV's, with beta = 20).
    head_budget: "pooled" (the highest of all heads' scores) or "equal" (the same number in every head).
    floor: each head keeps at least its own floor(floor * the layer's entries per head) highest, as in AdaKV.
    """

    def __init__(
        self,
        budget,
        window=32,
        kernel_size=7,
        pooling="max",
        *,
        layer_budget="entropy",
        head_budget="pooled",
        floor=0.0,
    ):
        super().__init__(budget, window, kernel_size, pooling)
        self.layer_budget, self.head_budget, self.floor = layer_budget, head_budget, floor

    def choose(self, layers, average):
        scores = [self.scores(layer) for layer in layers]
        chosen = []
        for layer, of_heads, count in zip(layers, scores, self.count(scores, average), strict=True):
            floor = count if self.head_budget == "equal" else math.floor(self.floor * count)
            chosen.append(self.over_heads(layer, of_heads, count, floor))
        return chosen

    def count(self, scores, average):
        """Entries of each layer, per head on average."""
        if self.layer_budget == "pyramid":
            return pyramid_budgets(len(scores), average, self.num_candidates)
        if self.layer_budget == "uniform":
            return [average] * len(scores)
        entropies = [entropy([score for row in of_heads for score in row]) for of_heads in scores]
        return layer_budgets(entropies, average * len(scores), self.num_candidates)

    def scores(self, layer):
        """Mean attention of the window times the head's largest value, pooled, then the maximum over the group."""
        of_heads = []
        for weights, entries in zip(layer.weights, layer.heads, strict=True):
            largest = max(float(entry.value.abs().sum()) for entry in entries)
            rows = (weights[:, -self.window :, : self.num_candidates].mean(1) * largest).tolist()
            of_queries = [pool(row, self.kernel_size, self.pooling) for row in rows]
            of_heads.append([max(column) for column in zip(*of_queries, strict=True)])
        return of_heads


def entropy(scores):
    """Entropy of the scores as a distribution, over its largest possible value: in [0, 1]."""
    total = sum(scores)
    shares = [score / total for score in scores]
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(max(2, len(scores)))


def layer_budgets(entropies, total, cap):
    """Whole entries per head of each layer: `total` shared by the entropies of the layers seen, none above `cap`."""
    return [math.floor(share + 1e-9) for share in share_out(entropies, total, cap)]  # 12 e / e may lie below 12
