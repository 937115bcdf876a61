"""D2O (arXiv:2406.13035): H2O with layer budgets, whose evicted entries merge into similar kept ones."""

import math

import torch

from .base import Method
from .choices import heavy_and_recent, share_out

SMALLEST_SHARE, LARGEST_SHARE = 0.01, 1.0


class D2O(Method):
    """Each layer holds S_l entries per head: min(sinks, S_l - 2) sinks, heavy hitters and recent ones, in a 3:1 ratio.

    S_l = max(1, floor(alpha_l P)), fixed by the prompt, the alpha_l averaging 1 / ratio or tokens / P; with tokens >= P
    every S_l is `tokens`. Entries leave after the prompt and after each step, by the attention received since the
    prompt. Each is compared with every kept entry of its head (the newest included) and merges into the most similar
    one, the smaller position among equals, if the similarity reaches the layer's threshold: the mean similarity of all
    that leave the first time the layer is compressed, then a moving average, updated before it is compared.

    similarity: cosine of the cached "key"s or of the "value"s.
    merge: "weighted" (see `merge_weights`), or "average" (the kept entry and all it takes in count alike).
    allocation: what the alpha_l are proportional to before clamping; see `layer_weights`.
    scaled: whether variances are scaled to [0, 1] across the heads of a layer.
    heavy_to_recent: heavy = floor(h / (h + r) * (S_l - sinks)), the rest is recent.
    """

    def __init__(
        self,
        budget,
        sinks=4,
        beta=0.7,
        *,
        similarity="key",
        merge="weighted",
        allocation="variance",
        scaled=True,
        heavy_to_recent=(3, 1),
    ):
        super().__init__(budget)
        self.sinks, self.beta = sinks, beta
        self.similarity, self.merge, self.allocation, self.scaled = similarity, merge, allocation, scaled
        self.heavy_to_recent = heavy_to_recent
        self.thresholds = {}

    def after_prompt(self, layers):
        capacity = self.limit(self.prompt_length)
        if self.prompt_length <= capacity:
            self.sizes = [capacity] * len(layers)
        else:
            spreads = [spread(torch.cat(layer.weights).sum(1), self.scaled) for layer in layers]
            share = capacity / self.prompt_length if "tokens" in self.budget else 1 / self.budget["ratio"]
            shares = clamped_shares(layer_weights(spreads, self.allocation), share)
            self.sizes = [max(1, math.floor(share * self.prompt_length + 1e-9)) for share in shares]
        super().after_prompt(layers)

    def after_step(self, layer):
        size = self.sizes[layer.index]
        if len(layer.heads[0]) <= size:
            return
        kept, evicted = zip(*(self.split(entries, size) for entries in layer.heads), strict=True)
        similarities = [self.compare(*pair) for pair in zip(evicted, kept, strict=True)]  # [evicted, kept] of each head
        mean = float(torch.stack([similarity.amax(-1) for similarity in similarities]).mean())
        threshold = self.thresholds.get(layer.index)
        self.thresholds[layer.index] = mean if threshold is None else moving_average(threshold, mean, self.beta)
        for head, of_head in enumerate(similarities):
            self.merge_into(kept[head], evicted[head], of_head, self.thresholds[layer.index])
            layer.heads[head] = kept[head]

    def split(self, entries, size):
        """Return the entries kept and those evicted."""
        sinks = max(0, min(self.sinks, size - 2))
        heavy = self.heavy_to_recent[0] * (size - sinks) // sum(self.heavy_to_recent)
        scores = [entry.mean_received for entry in entries]
        kept = heavy_and_recent(scores, sinks + heavy, size - sinks - heavy, sinks, self.protected(entries, size))
        return [entries[number] for number in kept], [
            entry for number, entry in enumerate(entries) if number not in kept
        ]

    def compare(self, evicted, kept):
        """Cosine similarities, [evicted, kept]."""
        first, second = (
            torch.stack([entry.key if self.similarity == "key" else entry.value for entry in entries])
            for entries in (evicted, kept)
        )
        return (first @ second.T) / (first.norm(dim=-1)[:, None] * second.norm(dim=-1))

    def merge_into(self, kept, evicted, similarities, threshold):
        """Merge what reaches the threshold into its most similar kept entry."""
        taken = {}
        for entry, row in zip(evicted, similarities.tolist(), strict=True):
            target = max(range(len(row)), key=lambda number: (row[number], -number))
            if row[target] >= threshold:
                taken.setdefault(target, []).append((entry, row[target]))
        for target, members in taken.items():
            if self.merge == "weighted":
                weights = merge_weights([similarity for _, similarity in members])
            else:
                weights = [1 / (1 + len(members))] * (1 + len(members))
            group = [kept[target], *(entry for entry, _ in members)]
            key = sum(weight * entry.key for weight, entry in zip(weights, group, strict=True))
            value = sum(weight * entry.value for weight, entry in zip(weights, group, strict=True))
            kept[target].key, kept[target].value = key, value


def spread(received, scaled=True):
    """How unevenly a layer's attention falls on the prompt: F_l, from the sums received [query_heads, prompt].

    Unbiased variance over the prompt of each query head, scaled to [0, 1] across the heads if asked, and their mean.
    """
    variances = received.var(-1)
    if not scaled:
        return float(variances.mean())
    scaled = (variances - variances.min()) / (variances.max() - variances.min() + 1e-6)
    return float(scaled.mean())


def layer_weights(spreads, allocation):
    """What the layers' shares are proportional to.

    "variance": exp(-F_l), the paper's softmax. "reciprocal": 1 / (F_l + 1e-6). "uniform": 1. "exponential":
    exp(-l / layers), by the layer's index l alone.
    """
    weights = {
        "variance": [math.exp(-spread) for spread in spreads],
        "reciprocal": [1 / (spread + 1e-6) for spread in spreads],
        "uniform": [1.0] * len(spreads),
        "exponential": [math.exp(-layer / len(spreads)) for layer in range(len(spreads))],
    }
    return weights[allocation]


def clamped_shares(weights, average):
    """Shares alpha_l of the prompt in proportion to the weights, in [0.01, 1], averaging `average`.

    What the upper clamp cuts off goes to the layers below it, in proportion to their weights, until none is above;
    then what the lower clamp needs comes from the layers that are not clamped, likewise.
    """
    total = average * len(weights)
    shares = share_out(weights, total, LARGEST_SHARE)
    free = [layer for layer, share in enumerate(shares) if share < LARGEST_SHARE]
    while below := [layer for layer in free if shares[layer] < SMALLEST_SHARE]:
        for layer in below:
            shares[layer] = SMALLEST_SHARE
        free = [layer for layer in free if layer not in below]
        rest = total - sum(share for layer, share in enumerate(shares) if layer not in free)
        weight = sum(weights[layer] for layer in free)
        for layer in free:
            shares[layer] = rest * weights[layer] / weight
    return shares


def moving_average(threshold, mean, beta):
    """Threshold after a step whose evicted entries have a mean similarity of `mean`."""
    return beta * mean + (1 - beta) * threshold


def merge_weights(similarities):
    """Weights of a kept entry and of what it takes in, which sum to 1: exp(1) and exp(similarity), normalised."""
    exponentials = [math.e, *(math.exp(similarity) for similarity in similarities)]
    return [exponential / sum(exponentials) for exponential in exponentials]
