"""CAKE (arXiv:2503.12491): layers whose attention is spread and restless hold more entries."""

import torch

from .base import Method
from .choices import choose, pool, window_within


class CAKE(Method):
    """Each head of a layer holds the layer's share of C = b(P) entries, its window of w included, in decode too.

    A decode step that leaves more keeps the last w entries and, of those before, the highest in the newest query's
    attention, average-pooled over those before only. A prompt with P <= C is held whole: the limit is then C per head.
    """

    def __init__(self, budget, window=32, kernel_size=5, gamma=200, tau1=1, tau2=1):
        super().__init__(budget)
        self.window, self.kernel_size, self.gamma = window, kernel_size, gamma
        self.tau1, self.tau2 = tau1, tau2

    def after_prompt(self, layers):
        capacity = self.limit(self.prompt_length)
        self.window = window_within(self.window, capacity)
        self.counts = [capacity - self.window] * len(layers)
        if self.prompt_length <= capacity:
            return
        num_candidates = self.prompt_length - self.window
        rows = [torch.cat(layer.weights)[:, -self.window :, :num_candidates] for layer in layers]
        preferences = [preference(*entropy_and_variance(row), self.tau1, self.tau2) for row in rows]
        self.counts = layer_budgets(preferences, capacity - self.window, num_candidates)
        for layer in layers:
            scores = [weights[:, -self.window :, :num_candidates] for weights in layer.weights]
            self.evict(layer, [score.mean(1) + self.gamma * variance(score) for score in scores])

    def after_step(self, layer):
        if len(layer.heads[0]) > self.counts[layer.index] + self.window:
            self.evict(layer, [weights[:, 0, : -self.window] for weights in layer.weights])

    def evict(self, layer, scores):
        """Keep the highest scores of each head ([group, entries before the window], pooled here) and the window."""
        for head, entries in enumerate(layer.heads):
            pooled = [pool(row.tolist(), self.kernel_size, "avg") for row in scores[head]]
            means = torch.tensor(pooled, dtype=torch.float64).mean(0).tolist()
            budget, safe = self.counts[layer.index] + self.window, range(len(means), len(entries))
            wanted = [*means, *(0 for _ in safe)]
            kept = choose(wanted, budget, self.protected(entries, budget), safe)
            layer.heads[head] = [entries[number] for number in kept]


def variance(weights):
    """Unbiased variance over the queries of weights [..., queries, keys]; 0 for a single query."""
    return weights.var(-2) if weights.shape[-2] > 1 else torch.zeros_like(weights[..., 0, :])


def entropy_and_variance(weights):
    """Sum of -A log(A + 1e-10), and of the variances over the queries, of weights [heads, queries, keys]."""
    return float(-(weights * (weights + 1e-10).log()).sum()), float(variance(weights).sum())


def preference(entropy, variance, tau1, tau2):
    """How much of the memory a layer asks for."""
    return entropy ** (1 / tau1) * variance ** (1 / tau2)


def layer_budgets(preferences, average, cap):
    """Entries outside the window of each layer's heads, `average * layers` in all and none above `cap`.

    Shares of the preferences (equal if all are 0), truncated and capped. What is missing is spread evenly over the
    layers below the cap, the remainder to the first of them; again, until nothing is missing.
    """
    total, weight = average * len(preferences), sum(preferences)
    shares = [total * preference / weight if weight else average for preference in preferences]
    budgets = [min(int(share), cap) for share in shares]
    while missing := total - sum(budgets):
        below = [layer for layer, budget in enumerate(budgets) if budget < cap]
        quota, remainder = divmod(missing, len(below))
        for rank, layer in enumerate(below):
            budgets[layer] = min(budgets[layer] + quota + (rank < remainder), cap)
    return budgets
