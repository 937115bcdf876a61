"""Attention of stock models to whole texts, with dense masks: windows in some layers, a policy's choices in others.

A layer's choices depend on nothing but its own queries and keys, so that each can be computed for all tokens at once.
"""

import torch
from transformers import AttentionInterface

from .policies.choices import heavy_and_recent, highest, pool, window_within

NAME = "dense_hybrid"


class DenseHybrid:
    """Evicts as `method` says, "H2O" or "SnapKV", in layers without a window; None: nothing is evicted.

    Args:
        prompt_length: tokens of the prompt, P.
        budget: entries per head.
    """

    def __init__(self, method=None, prompt_length=0, budget=0, **options):
        self.method, self.prompt_length, self.budget, self.options = method, prompt_length, budget, options
        self.kept = {}

    def __call__(self, module, query, key, value, attention_mask, scaling, sliding_window=None, s_aux=None, **_):
        length, group = query.shape[2], query.shape[1] // key.shape[1]
        at = torch.arange(length)
        scores = query[0].unflatten(0, (-1, group)) @ key[0][:, None].transpose(-1, -2) * scaling  # [H, group, T, T]
        causal = at <= at[:, None]
        if sliding_window is not None:
            weights = softmax(scores.masked_fill(~(causal & (at > at[:, None] - sliding_window)), -torch.inf), s_aux)
        else:
            scores = scores.masked_fill(~causal, -torch.inf)
            if self.method is not None:
                hidden = torch.stack([self.hidden(head, s) for head, s in self.heads(module, scores, s_aux)])
                scores = scores.masked_fill(hidden[:, None], -torch.inf)
            weights = softmax(scores, s_aux)
        return (weights @ value[0][:, None]).flatten(0, 1).transpose(0, 1)[None], None

    def heads(self, module, scores, sinks):
        groups = [None] * len(scores) if sinks is None else sinks.view(len(scores), -1)
        for head, (of_head, of_group) in enumerate(zip(scores, groups, strict=True)):
            yield (module.layer_idx, head), (of_head, of_group)

    def hidden(self, place, given):
        """Which keys each query does not see any more, [T, T]."""
        scores, sinks = given
        prompt, length = self.prompt_length, scores.shape[-1]
        hidden = torch.zeros(length, length, dtype=torch.bool)
        weights = softmax(scores[None, :, :prompt], None if sinks is None else sinks)[0]
        received, kept = torch.zeros(length), list(range(prompt))
        received += weights.mean(0).sum(0)
        kept = self.choose(kept, received, weights) if prompt > self.budget else kept
        for query in range(prompt, length):
            kept = [*kept, query]
            gone = torch.ones(length, dtype=torch.bool)
            gone[kept] = False
            hidden[query] = gone
            row = softmax(scores[None, :, query : query + 1].masked_fill(gone, -torch.inf), sinks)[0]
            received += row.mean(0)[0]
            if self.method == "H2O":
                kept = self.choose(kept, received, None)
        self.kept[place] = kept
        return hidden

    def choose(self, kept, received, weights):
        if self.method == "H2O":
            recent = -(-self.budget // 2)
            if len(kept) <= self.budget:
                return kept
            chosen = heavy_and_recent([float(received[i]) for i in kept], self.budget - recent, recent)
            return [kept[i] for i in chosen]
        window = window_within(self.options["window"], self.budget)
        candidates = len(kept) - window
        means = weights[:, -window:, :candidates].mean((0, 1))
        pooled = pool(means.tolist(), self.options["kernel_size"], "max")
        return [*highest(pooled, self.budget - window), *range(candidates, len(kept))]


def softmax(scores, sinks):
    """Softmax of scores [H, group, T, keys], with one more column for the sink of each head if there are any."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.view(scores.shape[0], scores.shape[1], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def answers(model, tokens, oracle):
    """Log-probabilities after each token of a text under an oracle, [T, vocab]."""
    AttentionInterface.register(NAME, oracle)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        with torch.no_grad():
            return model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    finally:
        model.config._attn_implementation = before
