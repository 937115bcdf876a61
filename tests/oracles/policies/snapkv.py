"""SnapKV (arXiv:2404.14469), PyramidKV (arXiv:2406.02069) and AdaKV (arXiv:2407.11550): the prompt compressed once."""

import math
from fractions import Fraction
from itertools import pairwise

from .base import Method
from .choices import choose, highest, pool, share_out, window_within


class WindowMethod(Method):
    """Compresses the prompt to C = b(P) entries per head on average, its last w always among them; then only grows."""

    def __init__(self, budget, window, kernel_size, pooling):
        super().__init__(budget)
        self.window, self.kernel_size, self.pooling = window, kernel_size, pooling

    def after_prompt(self, layers):
        capacity = self.limit(self.prompt_length)
        if self.prompt_length <= capacity:
            return
        self.window = window_within(self.window, capacity)
        self.num_candidates = self.prompt_length - self.window
        for layer, chosen in zip(layers, self.choose(layers, capacity - self.window), strict=True):
            for head, kept in enumerate(chosen):
                layer.heads[head] = [layer.heads[head][number] for number in kept]

    def after_step(self, layer):
        """Hold the new entry too."""

    def choose(self, layers, average):
        """Ascending indices of the entries kept, for each layer and head; `average` per head outside the window."""
        raise NotImplementedError

    def with_window(self, layer, scores, count):
        """Choose `count` candidates of a head, and the window."""
        budget, safe = count + self.window, range(self.num_candidates, self.prompt_length)
        return choose([*scores, *(0 for _ in safe)], budget, self.protected(layer.heads[0], budget), safe)

    def over_heads(self, layer, scores, count, floor):
        """Choose `count` candidates of each head on average, and the windows."""
        scores = [self.guarded(row, layer.heads[0], count + self.window) for row in scores]
        window = range(self.num_candidates, self.prompt_length)
        return [[*kept, *window] for kept in share_among_heads(scores, count * len(scores), floor)]

    def scores(self, layer):
        """Pooled attention of the window, mean over the group and the window's queries, [kv_heads][candidates]."""
        rows = [weights[:, -self.window :, : self.num_candidates].mean((0, 1)) for weights in layer.weights]
        return [pool(row.tolist(), self.kernel_size, self.pooling) for row in rows]


class SnapKV(WindowMethod):
    """The same number of entries in every head of every layer."""

    def __init__(self, budget, window=32, kernel_size=7, pooling="max"):
        super().__init__(budget, window, kernel_size, pooling)

    def choose(self, layers, average):
        return [[self.with_window(layer, scores, average) for scores in self.scores(layer)] for layer in layers]


class PyramidKV(WindowMethod):
    """Fewer entries in higher layers; see `pyramid_budgets`."""

    def __init__(self, budget, window=8, beta=20, kernel_size=7, pooling="max", decay="linear"):
        super().__init__(budget, window, kernel_size, pooling)
        self.beta, self.decay = beta, decay

    def choose(self, layers, average):
        counts = pyramid_budgets(len(layers), average, self.num_candidates, self.beta, self.decay)
        return [
            [self.with_window(layer, scores, count) for scores in self.scores(layer)]
            for layer, count in zip(layers, counts, strict=True)
        ]


class AdaKV(WindowMethod):
    """The heads of a layer share its entries by their scores; see `share_among_heads`."""

    def __init__(self, budget, window=32, kernel_size=7, pooling="max", alpha_f=0.2):
        super().__init__(budget, window, kernel_size, pooling)
        self.alpha_f = alpha_f

    def choose(self, layers, average):
        floor = math.floor(self.alpha_f * average)
        return [self.over_heads(layer, self.scores(layer), average, floor) for layer in layers]


def pyramid_budgets(num_layers, average, num_candidates, beta=20, decay="linear"):
    """Entries outside the window of each layer's heads, `num_layers * average` in all.

    The last layer of the pyramid has average / beta and the first 2 average - average / beta. Where 2 average exceeds
    the candidates, all layers have the average. `decay` says how the layers between come down:

    * "linear": in equal steps (the paper).
    * "geometric": by equal factors, with the linear one's ratio of first to last, 2 beta - 1.
    * "exponential": average / beta each, and what remains in proportion to exp(-layer).

    The two others may go over the candidates in a layer; what is cut off goes to the other layers in proportion to
    theirs. Integers by cumulative rounding, half to even.
    """
    if 2 * average > num_candidates or num_layers == 1:
        return [average] * num_layers
    last = Fraction(average) / Fraction(beta)
    first = 2 * average - last
    if decay == "linear":
        shares = [first - (first - last) * layer / (num_layers - 1) for layer in range(num_layers)]
    elif decay == "geometric":
        weights = [(2 * beta - 1) ** (-layer / (num_layers - 1)) for layer in range(num_layers)]
        shares = share_out(weights, num_layers * average, num_candidates)
    else:
        weights = [math.exp(-layer) for layer in range(num_layers)]
        rest = share_out(weights, num_layers * (average - last), num_candidates - last)
        shares = [last + share for share in rest]
    borders = [round(sum(shares[:layer])) for layer in range(num_layers + 1)]
    return [end - begin for begin, end in pairwise(borders)]


def share_among_heads(scores, total, floor):
    """Keep the `total` highest of all heads' scores, at least `floor` of each head; ascending indices by head.

    Among equals the smaller head, then the smaller index wins.
    """
    length = len(scores[0])
    flat = [score for row in scores for score in row]
    for head, row in enumerate(scores):
        for index in highest(row, floor):
            flat[head * length + index] = math.inf
    kept = highest(flat, total)
    return [[index % length for index in kept if index // length == head] for head in range(len(scores))]
