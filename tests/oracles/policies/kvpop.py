"""KVpop (arXiv:2607.05061): an mLSTM cell, one token after another, rates each token when it leaves the window."""

import json
import math

import torch
from safetensors import safe_open

from .base import GrowingMethod
from .choices import highest


class KVpop(GrowingMethod):
    """The last W entries, and of the others those with the highest scores."""

    def __init__(self, budget, scorer):
        super().__init__(budget)
        with safe_open(scorer, "pt") as stored:
            self.window = json.loads(stored.metadata()["scorer"])["window"]
            self.weights = {name: stored.get_tensor(name).double() for name in stored.keys()}
        self.cells = {}

    def append(self, entries, key, value, position):
        super().append(entries, key, value, position)
        entries[-1].score = 0.0
        layer, head = next(
            (layer.index, number)
            for layer in self.layers
            for number, other in enumerate(layer.heads)
            if other is entries
        )
        cell = self.cells.setdefault((layer, head), Cell(self.weights, layer, head))
        cell.read(torch.cat((key, value)))
        leaving = [entry for entry in entries if entry.position == position - self.window]
        for entry in leaving:
            entry.score = cell.score(torch.cat((entry.raw_key, entry.value)))

    def keep(self, layer, head, budget, protected):
        entries = layer.heads[head]
        recent = len(entries) - min(self.window, budget)
        scores = [math.inf if number >= recent else entry.score for number, entry in enumerate(entries)]
        return highest([math.inf if number in protected else score for number, score in enumerate(scores)], budget)


class Cell:
    """One head's weights and state; nothing is stabilized, in float64."""

    def __init__(self, weights, layer, head):
        self.weights = {name: weight[layer, head] for name, weight in weights.items()}
        self.size = (len(self.weights["project"]) - 2) // 3
        self.matrix, self.sums = torch.zeros(self.size, self.size).double(), torch.zeros(self.size).double()

    def parts(self, states):
        states = (states - self.weights["mean"]) / self.weights["deviation"]
        projected = self.weights["project"] @ states + self.weights["project_bias"]
        return states, projected.split((self.size, self.size, self.size, 1, 1))

    def read(self, states):
        _, (_, key, value, enter, forget) = self.parts(states)
        key, forget = key / math.sqrt(self.size), torch.sigmoid(forget)
        self.matrix = forget * self.matrix + enter.exp() * torch.outer(value, key)
        self.sums = forget * self.sums + enter.exp() * key

    def score(self, states):
        states, (query, *_) = self.parts(states)
        answer = self.matrix @ query / max(abs(float(self.sums @ query)), 1.0)
        hidden = self.weights["hidden"] @ torch.cat((states, answer)) + self.weights["hidden_bias"]
        return float(torch.nn.functional.silu(hidden) @ self.weights["output"] + self.weights["output_bias"])
