"""Expected Attention (arXiv:2510.00636), KVzip (2505.23416), Attention Matching (2602.16284): question-agnostic."""

import math

import numpy as np
import torch
from scipy.optimize import lsq_linear

from .base import Method
from .choices import highest
from .snapkv import share_among_heads


class ExpectedAttention(Method):
    """Queries to come are Gaussian as those of the prompt, turned by the mean rotation of the next positions."""

    def __init__(self, budget, sinks=4, future=512, epsilon=0.01, covariance=True, alpha_f=0.2):
        super().__init__(budget)
        self.sinks, self.future, self.epsilon = sinks, future, epsilon
        self.covariance, self.alpha_f = covariance, alpha_f
        self.raw_queries = {}

    def attend_prompt(self, index, query, key, value, first):
        self.raw_queries[index] = query
        return super().attend_prompt(index, query, key, value, first)

    def after_prompt(self, layers):
        capacity = self.limit(self.prompt_length)
        if self.prompt_length <= capacity:
            return
        sinks = min(self.sinks, capacity)
        for layer in layers:
            scores = [[math.inf] * sinks + self.scores(layer, head, sinks) for head in range(len(layer.heads))]
            scores = [self.guarded(row, layer.heads[0], capacity) for row in scores]
            floor = sinks + math.floor(self.alpha_f * (capacity - sinks))
            chosen = share_among_heads(scores, capacity * len(scores), floor)
            layer.heads = [
                [entries[number] for number in kept] for entries, kept in zip(layer.heads, chosen, strict=True)
            ]

    def scores(self, layer, head, sinks):
        entries, size = layer.heads[head][sinks:], self.decoder.head_dim
        ahead = range(self.prompt_length, self.prompt_length + self.future)
        turn = sum(self.decoder.rotate(torch.eye(size).double(), position) for position in ahead).T / self.future
        expected = torch.zeros(len(entries), dtype=torch.float64)
        for queries in self.queries_of(self.raw_queries[layer.index], head):
            queries = queries[self.sinks :]
            mean = turn @ queries.mean(0)
            spread = turn @ torch.cov(queries.T, correction=0) @ turn.T * self.covariance
            logits = [entry.key @ mean * size**-0.5 + entry.key @ spread @ entry.key / (2 * size) for entry in entries]
            expected += torch.stack(logits).softmax(0) / self.decoder.group
        norms = torch.stack([entry.value.norm() for entry in entries])
        return ((expected + self.epsilon) * norms).tolist()

    def after_step(self, layer):
        """Hold the new entry too."""


class KVzip(Method):
    """The prompt is fed once more behind itself, chunk by chunk; what these queries attend to most stays."""

    def __init__(self, budget, sinks=4, chunk=2048, lead=8, instruction=""):
        super().__init__(budget)
        self.sinks, self.chunk, self.lead = sinks, chunk, lead
        self.instruction = [] if isinstance(instruction, str) else list(instruction)

    def feed_prompt(self, prompt):
        self.prompt = prompt
        return super().feed_prompt(prompt)

    def after_prompt(self, layers):
        capacity = self.limit(self.prompt_length)
        if self.prompt_length <= capacity:
            return
        self.repeat(layers)
        self.keep(layers, self.best, capacity)

    def repeat(self, layers):
        """Feed the prompt again; `best` is the highest attention to each of its positions, by layer and head."""
        length = self.prompt_length
        self.best = [[[0.0] * length for _ in layer.heads] for layer in layers]
        for begin in range(0, length, self.chunk):
            self.concerned = range(begin, min(begin + self.chunk, length))
            again = self.instruction + self.prompt[max(0, begin - self.lead) : self.concerned.stop]
            self.decoder.feed(again, length, self.attend_again)

    def keep(self, layers, every_score, capacity):
        """Keep the entries of the highest scores, by layer and head, of the whole model."""
        flat = [
            math.inf if position < self.sinks else score
            for layer, heads in zip(layers, every_score, strict=True)
            for entries, scores in zip(layer.heads, heads, strict=True)
            for position, score in enumerate(self.guarded(scores, entries, capacity))
        ]
        kept = set(highest(flat, capacity * sum(len(layer.heads) for layer in layers)))
        order = iter(range(len(flat)))
        for layer in layers:
            layer.heads = [[entry for entry in entries if next(order) in kept] for entries in layer.heads]

    def attend_again(self, index, query, key, value, first):
        outputs, places = [], torch.arange(first, first + query.shape[1])
        for head, entries in enumerate(self.layers[index].heads):
            keys = torch.stack([entry.key for entry in entries])
            keys = torch.cat((keys, self.decoder.rotate(key[head], places)))
            values = torch.cat((torch.stack([entry.value for entry in entries]), value[head]))
            competing = [p in self.concerned or p < self.sinks or p >= self.prompt_length for p in range(len(keys))]
            for queries in self.decoder.rotate(self.queries_of(query, head), places):
                rows = []
                for number, vector in enumerate(queries):
                    seen = len(entries) + number + 1
                    scores = keys[:seen] @ vector * self.decoder.scaling
                    rows.append(scores.softmax(0) @ values[:seen])
                    among = scores.masked_fill(~torch.tensor(competing[:seen]), -math.inf).softmax(0)
                    for position in self.concerned:
                        self.best[index][head][position] = max(self.best[index][head][position], float(among[position]))
                outputs.append(torch.stack(rows))
        return torch.stack(outputs)

    def after_step(self, layer):
        """Hold the new entry too."""


class AttentionMatching(KVzip):
    """Kept keys get biases by bounded least squares on attention mass, and values by least squares on outputs."""

    def __init__(self, budget, queries=1024, bias_bound=3.0, ridge=1e-3, head_budget="pooled", **options):
        super().__init__(budget, **options)
        self.queries, self.bias_bound, self.ridge, self.head_budget = queries, bias_bound, ridge, head_budget

    def after_prompt(self, layers):
        capacity = self.limit(self.prompt_length)
        if self.prompt_length <= capacity:
            return
        self.gathered = [[[] for _ in layer.heads] for layer in layers]
        self.repeat(layers)  # queries and the sums of exp of their scores
        blocks = [[self.matched_of(entries, capacity) for entries in layer.heads] for layer in layers]
        attention = [
            [
                torch.stack([(query @ torch.stack([e.key for e in block]).T).exp() / total for query, total in queries])
                for queries, block in zip(*of_layer, strict=True)
            ]
            for of_layer in zip(self.gathered, blocks, strict=True)
        ]
        scores = []
        for layer, *of_layer in zip(layers, blocks, attention, strict=True):
            scores.append([])
            for entries, block, of_head in zip(layer.heads, *of_layer, strict=True):
                rms = of_head.square().mean(0).sqrt().tolist()
                by_position = {entry.position: score for entry, score in zip(block, rms, strict=True)}
                scores[-1].append([by_position.get(entry.position, math.inf) for entry in entries])
        if self.head_budget == "equal":
            for layer, of_layer in zip(layers, scores, strict=True):
                layer.heads = [
                    [entries[number] for number in highest(of_head, capacity)]
                    for entries, of_head in zip(layer.heads, of_layer, strict=True)
                ]
        else:
            self.keep(layers, scores, capacity)
        for layer, *of_layer in zip(layers, blocks, attention, strict=True):
            for entries, block, of_head in zip(layer.heads, *of_layer, strict=True):
                kept = {entry.position for entry in entries}
                staying = [number for number, entry in enumerate(block) if entry.position in kept]
                if 0 < len(staying) < len(block):
                    self.match(block, staying, of_head)

    def matched_of(self, entries, capacity):
        protected = self.protected(entries, capacity)
        return [e for number, e in enumerate(entries) if e.position >= self.sinks and number not in protected]

    def match(self, block, staying, attention):
        values, attention = torch.stack([entry.value for entry in block]).numpy(), attention.numpy()
        part, unit, whole = attention[:, staying], np.eye(len(staying)), attention.sum(-1)
        pull = math.sqrt(self.ridge * np.square(part).sum(0).mean())
        wanted = np.concatenate((whole, pull * np.ones(len(staying))))
        bounds = math.exp(-self.bias_bound), math.exp(self.bias_bound)
        weights = lsq_linear(np.vstack((part, pull * unit)), wanted, bounds, method="bvls", tol=1e-14).x
        shares = part * weights / (1 - whole + part @ weights)[:, None]
        pull = math.sqrt(self.ridge * np.square(shares).sum(0).mean())
        wanted = np.vstack((attention @ values, pull * values[staying]))
        fitted = np.linalg.lstsq(np.vstack((shares, pull * unit)), wanted, rcond=None)[0]
        for number, weight, value in zip(staying, weights, fitted, strict=True):
            block[number].bias, block[number].value = math.log(weight), torch.tensor(value)

    def attend_again(self, index, query, key, value, first):
        places, every = torch.arange(first, first + query.shape[1]), -(-self.prompt_length // self.queries)
        for head, gathered in enumerate(self.gathered[index]):
            new = self.decoder.rotate(key[head], places)
            keys = torch.cat((torch.stack([entry.key for entry in self.layers[index].heads[head]]), new))
            for queries in self.decoder.rotate(self.queries_of(query, head), places) * self.decoder.scaling:
                for number in range(0, len(queries), every):
                    seen = keys[: len(keys) - len(queries) + number + 1]
                    gathered.append((queries[number], (seen @ queries[number]).exp().sum()))
        return super().attend_again(index, query, key, value, first)
