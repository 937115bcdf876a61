"""Attention Matching (arXiv:2602.16284): fewer keys, each with a bias, and values fitted to what attention returned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Literal

import torch
from pydantic import Field as Range
from pydantic import StrictFloat
from torch import Tensor
from typing_extensions import override

from dmc.config.settings import Count, checked_dataclass
from dmc.kernels.base import BIAS, LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import places
from dmc.policies.base import above_all
from dmc.policies.budgets import keep_top
from dmc.policies.layer_attention import Cache, RotaryTables
from dmc.policies.repetition import EndedPrompt, Repetition, RepetitionPolicy, SecondReading

STEPS = 50
"""Most changes of the weights that are at a bound; a few are the rule."""


@checked_dataclass(frozen=True, kw_only=True)
class AttentionMatching(RepetitionPolicy):
    """Keep some keys C_k of each head with biases beta and values C_v that attend as all of its keys K and values V do.

    With the reference queries q of a repetition of the text ("repeat-prefill"), a_i(q) = softmax(q^T K / sqrt(d))_i,

        C_k: the keys with the highest root mean square of a_i(q) (section 3.3)
        beta = log w, w = argmin over w of sum over q of (sum over C_k of w_i a_i(q) - 1)^2 (the mass, section 3.2)
        C_v = argmin over C of sum over q of ||softmax(q^T C_k / sqrt(d) + beta) C - a(q) V||^2 (the output)

    Sinks and protected entries stay as they are and are not among K, nor is the slot that a merging gate has open.
    Differs from the authors' code: masses are relative to each query's; both fits are drawn towards w = 1 and the keys'
    own values; heads share the model's budget by the scores of this text, not by a table of the model's heads; queries
    of later layers have seen the cache before compression. A later turn repeats the whole text.
    """

    queries: Count = 1024
    """Number of reference queries of each query head at most, evenly spread over the repetition."""
    bias_bound: Annotated[StrictFloat, Range(gt=0, le=20)] = 3.0
    """Largest magnitude of beta that one compression adds."""
    ridge: Annotated[StrictFloat, Range(ge=1e-4, le=1)] = 1e-3
    """Weight of the deviation from w = 1 and from a key's own value, over the mean square of a kept key's attention."""
    head_budget: Literal["pooled", "equal"] = "pooled"
    """Whether heads of all layers compete for entries, or have as many each."""

    @property
    def serves_8_bit(self) -> bool:
        """See `CachePolicy`: it rewrites values."""
        return False

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """See `CachePolicy`; also a bias of every slot."""
        return (*super().fields(layout), Field(BIAS, torch.float32, "slot"))

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: RotaryTables) -> Matching:
        return Matching(cache, backend, self, rotary)


class Matching(SecondReading):
    """Gathers queries while a prompt is repeated, then fits the entries that stay to what all of them returned."""

    policy: AttentionMatching

    @override
    def append(self, layer_index: int, batch: ForwardBatch, tokens: NewTokens) -> VisibleKeys:
        layer, rows = self.cache.layer(layer_index), batch.row_index
        first = layer.lengths[rows].long()
        seen = super().append(layer_index, batch, tokens)
        layer = self.cache.layer(layer_index)  # the pool may have moved
        slots = first[..., None] + torch.arange(batch.most_new, device=rows.device)
        tables = layer.block_tables[rows]
        place = places(tables, slots.clamp_max(tables.shape[-1] * layer.block_size - 1), layer.block_size)
        assert layer.bias is not None
        bias, is_new = layer.bias.view(-1), slots < layer.lengths[rows][..., None]
        bias.index_put_((place,), -bias[place].where(is_new, 0.0), accumulate=True)  # 0 elsewhere, wherever that is
        return seen

    @override
    def repetition(self, prompt: EndedPrompt, chunk: range) -> ReferenceQueries:
        if chunk.start == 0:
            self._queries: list[list[Tensor]] = [[] for _ in prompt.longest]
        every = -(-prompt.num_tokens // self.policy.queries)
        return ReferenceQueries(self.cache, self.backend, prompt, self._queries, every)

    @override
    def compress(self, prompt: EndedPrompt) -> None:
        layers = range(self.cache.layout.num_layers)
        scores = [self._block(i, prompt).scores() for i in layers]
        if self.policy.head_budget == "equal":
            keep = [keep_top(of_layer, prompt.limit) for of_layer in scores]
        else:
            total = prompt.limit * self.cache.lengths[:, prompt.row].numel()
            parts = keep_top(torch.cat([of_layer.flatten() for of_layer in scores]), total)
            counts = [of_layer.numel() for of_layer in scores]
            keep = [part.view_as(of_layer) for part, of_layer in zip(parts.split(counts), scores, strict=True)]
        for i in layers:
            self._block(i, prompt).match(keep[i], self.policy.bias_bound, self.policy.ridge)
            self.backend.compact(self.cache.layer(i), prompt.rows, keep[i][None])
        self._queries = []

    def _block(self, index: int, prompt: EndedPrompt) -> Block:
        layer, num_entries = self.cache.layer(index), prompt.longest[index]
        entries = self._entries(index, prompt.rows, prompt.tokens_seen, num_entries)
        fixed = entries.exists & (entries.positions < self.policy.sinks)
        compression = self.cache.layout.compression
        if compression is not None and compression.action == "merge":
            fixed |= entries.slots == entries.lengths[..., None] - 1
        if self.policy.protect:
            fixed |= self._protector.chosen(prompt.row, entries.positions, prompt.limit)
        place = places(layer.block_tables[prompt.rows], entries.slots[None, None], layer.block_size)
        queries = torch.cat(self._queries[index]).transpose(0, 1).float()
        return Block(
            layer, place[0], entries.read_keys()[0].float(), entries.read_values()[0].float(), entries.exists[0],
            fixed[0], queries.unflatten(0, (len(place[0]), -1)).flatten(1, 2),
        )  # fmt: skip


class ReferenceQueries(Repetition):
    """Gathers every n-th query of each layer, times the factor on the scores, [tokens, H_q, D]."""

    def __init__(
        self, cache: Cache, backend: ModuleType, prompt: EndedPrompt, queries: list[list[Tensor]], every: int
    ) -> None:
        super().__init__(cache, backend, prompt)
        self._queries, self._every = queries, every

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        self._queries[layer_index].append(query[:: self._every] * scaling)
        return super().attend(layer_index, batch, query, tokens, scaling)


@dataclass
class Block:
    """The entries of one layer of a sequence that are matched: those that exist and are not fixed."""

    layer: LayerCache
    place: Tensor
    """Of each entry in flattened pages, int64 [H, N]."""
    key: Tensor
    """Rotated keys, float32 [H, N, D]."""
    value: Tensor
    """Values, float32 [H, N, D]."""
    exists: Tensor
    """Bool [H, N]."""
    fixed: Tensor
    """Which entries stay as they are, bool [H, N]."""
    queries: Tensor
    """Reference queries times the factor on the scores, float32 [H, n, D]."""

    @property
    def bias(self) -> Tensor:
        """Biases in pages, flattened."""
        assert self.layer.bias is not None
        return self.layer.bias.view(-1)

    def logits(self, head: int) -> Tensor:
        """Scores of a head's entries with their biases, -inf of those that are not matched, [n, N]."""
        logits = self.queries[head] @ self.key[head].T + self.bias[self.place[head]]
        return logits.masked_fill_(~self.exists[head] | self.fixed[head], -torch.inf)

    def scores(self) -> Tensor:
        """Root mean square of the attention to each entry, [H, N]; +inf: it is fixed, -inf: there is none."""
        attention = (self.logits(head).softmax(-1).nan_to_num(0.0) for head in range(len(self.key)))
        scores = torch.stack([of_head.square().mean(0).sqrt() for of_head in attention])
        return above_all(scores, self.fixed).masked_fill(~self.exists, -torch.inf)

    def match(self, keep: Tensor, bias_bound: float, ridge: float) -> None:
        """Write biases and values of the entries that stay, bool [H, N], in place."""
        values = self.layer.value_pages.view(-1, self.value.shape[-1])
        for head, leaves in enumerate((self.exists & ~keep).any(-1).tolist()):
            kept = (keep[head] & ~self.fixed[head]).nonzero()[:, 0]
            if leaves and len(kept):
                place = self.place[head, kept]
                bias, value = matched(self.logits(head), self.value[head], kept, bias_bound, ridge)
                self.bias[place] += bias
                values[place] = value.to(values.dtype)


def matched(logits: Tensor, value: Tensor, kept: Tensor, bias_bound: float, ridge: float) -> tuple[Tensor, Tensor]:
    """Fit biases and values of kept entries to the attention of all, see `AttentionMatching`.

    Args:
        logits: scores of all entries, -inf of those left out, [n, N].
        value: their values, [N, D].
        kept: indices of the kept ones, int64 [t].
        bias_bound: largest magnitude of a bias.
        ridge: weight of the deviation from no bias and from the own value.
    Returns:
        What their scores gain, [t], and their values, [t, D]; float64.
    """
    logits, value = logits.double(), value.double()
    attention = logits.softmax(-1)
    weights = bounded_least_squares(attention[:, kept], bias_bound, ridge)
    shares = (logits[:, kept] + weights.log()).softmax(-1)
    missing = attention @ value - shares @ value[kept]
    gram = shares.T @ shares
    gram.diagonal().add_(_pull(gram, ridge))
    return weights.log(), value[kept] + torch.linalg.solve(gram, shares.T @ missing)


def bounded_least_squares(attention: Tensor, bias_bound: float, ridge: float) -> Tensor:
    """Find the weights w that make each query's attention to kept entries, float64 [n, t], sum up to 1; [t].

    Primal-dual active sets: weights beyond a bound, or held at it by their slope, are set to it, the others solved for.
    """
    low, high = math.exp(-bias_bound), math.exp(bias_bound)
    gram, wanted = attention.T @ attention, attention.sum(0)
    pull = _pull(gram, ridge)
    gram.diagonal().add_(pull)
    wanted = wanted + pull
    step, held = 1 / gram.diagonal(), torch.zeros_like(wanted)
    weights = torch.linalg.solve(gram, wanted)
    for _ in range(STEPS):
        moved = weights - step * (gram @ weights - wanted)
        free, held_before = (moved >= low) & (moved <= high), held
        held = moved.clamp(low, high).masked_fill(free, 0)
        if torch.equal(held, held_before):
            break
        others = gram * (free & free[:, None]) + torch.diag((~free).to(gram.dtype))
        weights = torch.linalg.solve(others, torch.where(free, wanted - gram @ held, held))
    return weights.clamp(low, high)


def _pull(gram: Tensor, ridge: float) -> Tensor:
    return (ridge * gram.diagonal().mean()).clamp_min(torch.finfo(gram.dtype).tiny)
