"""What every training-free method shares: entries, full attention over a prompt, decode steps, and no compression."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Entry:
    """One key and value of one KV head, and the attention it has received.

    received: sum over the queries that saw it, for each query head of the group, [group].
    squared: sum over those queries of the square of the group's mean.
    """

    position: int
    raw_key: Tensor
    key: Tensor
    value: Tensor
    received: Tensor
    squared: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    num_queries: int = 0
    bias: float = 0.0

    @property
    def mean_received(self):
        return float(self.received.mean())


@dataclass
class Layer:
    """The cache of one layer and the attention of what was fed last.

    heads: entries of each KV head in ascending position.
    weights: for each KV head [group, queries, entries]; after a decode step, the entries include the new one.
    """

    index: int
    heads: list[list[Entry]]
    weights: list[Tensor]


@dataclass
class Trace:
    """What a method did.

    log_probs: after the prompt and after each continuation token fed, float64, [len(continuation), vocab].
    slots: entries held at the end, int64, [layers, kv_heads].
    positions: those entries' positions, ascending, by layer and KV head.
    """

    log_probs: Tensor
    slots: Tensor
    positions: list[list[list[int]]]


class Method:
    """Keeps everything; the methods say otherwise in `after_prompt`, `after_step` and `read`."""

    protect = 0.0

    def __init__(self, budget):
        self.budget = budget
        self.num_seen = 0

    def limit(self, num_tokens):
        """Entries per KV head allowed for `num_tokens` tokens; a ratio of 1 allows all there will ever be."""
        if "tokens" in self.budget:
            return int(self.budget["tokens"])
        if self.budget["ratio"] <= 1:
            return 10**9
        return max(1, math.floor(num_tokens / self.budget["ratio"]))

    def protected(self, entries, budget):
        """Indices of the entries that stay: the first and last of the prompt, for a budget when it ended."""
        if not self.protect:
            return set()
        count = min(2 * max(1, math.floor(self.protect * budget)), budget // 2)
        first, last = range(count - count // 2), range(self.prompt_length - count // 2, self.prompt_length)
        return {number for number, entry in enumerate(entries) if entry.position in first or entry.position in last}

    def guarded(self, scores, entries, budget):
        """Scores of the first entries, infinite where they are protected."""
        protected = self.protected(entries, budget)
        return [math.inf if number in protected else score for number, score in enumerate(scores)]

    def run(self, decoder, prompt, continuation):
        self.decoder, self.prompt_length = decoder, len(prompt)
        self.layers = [
            Layer(index, [[] for _ in range(decoder.num_kv_heads)], []) for index in range(len(decoder.layers))
        ]
        log_probs = [self.feed_prompt(prompt)]
        for token in continuation[:-1]:
            self.num_seen += 1
            log_probs.append(decoder.feed([token], self.num_seen - 1, self.attend_step)[0])
        return Trace(
            torch.stack(log_probs),
            torch.tensor([[len(entries) for entries in layer.heads] for layer in self.layers]),
            [[[entry.position for entry in entries] for entries in layer.heads] for layer in self.layers],
        )

    def feed_prompt(self, prompt):
        """Feed the whole prompt and compress; return the log-probs after its last token, [vocab]."""
        self.num_seen = len(prompt)
        log_probs = self.decoder.feed(prompt, 0, self.attend_prompt)
        self.after_prompt(self.layers)
        return log_probs[-1]

    def attend_prompt(self, index, query, key, value, first):
        """Full causal attention; the entries of the prompt come to be."""
        layer = self.layers[index]
        layer.weights = []
        outputs = []
        for head, entries in enumerate(layer.heads):
            for offset in range(key.shape[1]):
                self.append(entries, key[head, offset], value[head, offset], first + offset)
            queries = self.decoder.rotate(self.queries_of(query, head), torch.arange(first, first + query.shape[1]))
            scores = queries @ torch.stack([entry.key for entry in entries]).T * self.decoder.scaling
            future = torch.ones(scores.shape[-2:]).triu(1).bool()
            weights = scores.masked_fill(future, -math.inf).softmax(-1)
            outputs.append(weights @ torch.stack([entry.value for entry in entries]))
            layer.weights.append(weights)
            for column, entry in enumerate(entries):
                self.record(entry, weights[:, column:, column])
        return torch.cat(outputs)

    def attend_step(self, index, query, key, value, first):
        """One new token: it enters, the entries that may be read are attended to, then the layer is compressed."""
        layer = self.layers[index]
        for head, entries in enumerate(layer.heads):
            self.append(entries, key[head, 0], value[head, 0], first)
        rotated = self.decoder.rotate(query[:, 0], self.place(layer))
        layer.weights = []
        outputs = []
        for head, readable in enumerate(self.read(layer, rotated)):
            entries = [layer.heads[head][number] for number in readable]
            keys = torch.stack([entry.key for entry in entries])
            bias = torch.tensor([entry.bias for entry in entries], dtype=torch.float64)
            weights = (self.queries_of(rotated, head) @ keys.T * self.decoder.scaling + bias).softmax(-1)
            outputs.append(weights @ torch.stack([entry.value for entry in entries]))
            layer.weights.append(weights[:, None])
            for column, entry in enumerate(entries):
                self.record(entry, weights[:, column, None])
        self.after_step(layer)
        return torch.cat(outputs)[:, None]

    def append(self, entries, key, value, position):
        received = torch.zeros(self.decoder.group, dtype=torch.float64)
        entries.append(Entry(position, key, self.decoder.rotate(key, position), value, received))

    def queries_of(self, query, head):
        """Query heads of a KV head's group."""
        return query[head * self.decoder.group : (head + 1) * self.decoder.group]

    @staticmethod
    def record(entry, weights):
        """Add the attention [group, queries] that an entry receives."""
        entry.received = entry.received + weights.sum(-1)
        entry.squared = entry.squared + weights.mean(0).square().sum()
        entry.num_queries += weights.shape[-1]

    def place(self, layer):
        """Return the position at which the new token's query is rotated; keys may be moved here."""
        return self.num_seen - 1

    def read(self, layer, query):
        """Indices of the entries each KV head attends to, given the rotated query [query_heads, head_dim]."""
        return [list(range(len(entries))) for entries in layer.heads]

    def after_prompt(self, layers):
        """Compress all layers after the prompt: by default as after a step."""
        for layer in layers:
            self.after_step(layer)

    def after_step(self, layer):
        """Compress one layer after a decode step."""


class GrowingMethod(Method):
    """Holds at most b(n) entries in every head at any time."""

    def after_step(self, layer):
        budget = self.limit(self.num_seen)
        for head, entries in enumerate(layer.heads):
            if len(entries) > budget:
                protected = self.protected(entries, self.limit(self.prompt_length))
                layer.heads[head] = [entries[number] for number in self.keep(layer, head, budget, protected)]

    def keep(self, layer, head, budget, protected):
        """Ascending indices of the `budget` entries that a KV head keeps, the protected ones among them."""
        raise NotImplementedError
