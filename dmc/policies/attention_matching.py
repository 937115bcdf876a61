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
from dmc.kernels.pages import places, slots_below
from dmc.policies.base import above_all
from dmc.policies.budgets import keep_top
from dmc.policies.layer_attention import Cache, Rotary
from dmc.policies.repetition import EndedPrompt, Repetition, RepetitionPolicy, SecondReading

STEPS = 50
"""Most changes of the weights that are at a bound; a few are the rule."""


@checked_dataclass(frozen=True, kw_only=True)
class AttentionMatching(RepetitionPolicy):
    """Keep some keys C_k of each head with biases beta and values C_v that attend as all of its keys K and values V do.

    With the reference queries q of a repetition of the text ("repeat-prefill"), their attention a_i(q) to K, and its
    sum s(q),

        C_k: the keys with the highest root mean square of a_i(q) (section 3.3)
        beta = log w, w = argmin over w of sum over q of (sum over C_k of w_i a_i(q) - s(q))^2 (the mass, section 3.2)
        C_v = argmin over C of sum over q of ||sum over C_k of w_i a_i(q) C_i / z(q) - sum over K of a_i(q) v_i||^2

    where z(q) = 1 - s(q) + sum over C_k of w_i a_i(q) normalizes attention again. Sinks, protected entries and the open
    slot of a merging gate are not among K and stay unchanged. A later turn repeats and fits what is new; earlier
    entries keep scores, biases and values. Differs from the paper: a(q) is the attention of the repetition, which
    attends to itself too, so queries that hardly attend to K have little weight. Both fits are regularized towards
    w = 1 and the keys' own values. Heads share the model's budget by the scores of this text, not by a table of heads.
    Queries of later layers have seen the cache before compression.
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
        """See `CachePolicy`; also each entry's bias and score, and what has been repeated and fitted."""
        kept = *super().fields(layout), Field(BIAS, torch.float32, "slot"), Field("score", torch.float32, "slot")
        fitted = Field("fitted", torch.int32, "row", (layout.num_kv_heads,))
        return (*kept, Field("repeated", torch.int32, "row"), fitted)

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> Matching:
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
    def first_repeated(self, prompt: EndedPrompt) -> int:
        first = int(self.cache.fields["repeated"][0, prompt.row])
        self._queries: list[list[Tensor]] = [[] for _ in prompt.longest]
        self._log_sums: list[list[Tensor]] = [[] for _ in prompt.longest]
        self._every = -(-(prompt.num_tokens - first) // self.policy.queries)
        return first

    @override
    def repetition(self, prompt: EndedPrompt, chunk: range) -> ReferenceQueries:
        return ReferenceQueries(self.cache, self.backend, prompt, self._queries, self._log_sums, self._every)

    @override
    def compress(self, prompt: EndedPrompt) -> None:
        layers = range(self.cache.layout.num_layers)
        fitted = self.cache.fields["fitted"][:, prompt.row]
        scores = [self._block(i, prompt).scores(self._every) for i in layers]
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
        self.cache.fields["repeated"][:, prompt.row] = prompt.num_tokens
        fitted.copy_((self.cache.lengths[:, prompt.row] - self._num_open).clamp_min(0))
        self._queries, self._log_sums = [], []

    @property
    def _num_open(self) -> int:
        """Number of last slots that tokens to come may be merged into."""
        compression = self.cache.layout.compression
        return int(compression is not None and compression.action == "merge")

    def _block(self, index: int, prompt: EndedPrompt) -> Block:
        layer, num_entries = self.cache.layer(index), prompt.longest[index]
        entries = self._entries(index, prompt.rows, prompt.tokens_seen, num_entries)
        fixed = entries.positions < self.policy.sinks
        is_open = entries.slots >= entries.lengths[..., None] - self._num_open
        if self.policy.protect:
            fixed |= self._protector.chosen(prompt.row, entries.positions, prompt.limit)
        place = places(layer.block_tables[prompt.rows], entries.slots[None, None], layer.block_size)
        fitted = slots_below(self.cache.fields["fitted"][index, prompt.row], num_entries)
        queries = torch.cat(self._queries[index]).transpose(0, 1).float()
        return Block(
            layer=layer,
            place=place[0],
            key=entries.read_keys()[0].float(),
            value=entries.read_values()[0].float(),
            exists=entries.exists[0],
            fixed=(fixed & entries.exists)[0],
            is_open=(is_open & entries.exists)[0],
            fitted=fitted,
            queries=queries.unflatten(0, (len(place[0]), -1)).flatten(1, 2),
            log_sums=torch.cat(self._log_sums[index], dim=-1).flatten(1, 2),
        )


class ReferenceQueries(Repetition):
    """Gathers every n-th query of each layer.

    Args:
        cache: the engine's cache.
        backend: kernel module.
        prompt: what is repeated.
        queries: by layer; receives them, times the factor on the scores, [tokens, H_q, D].
        log_sums: by layer; receives the log of the sum of exp of their scores, [H, group, tokens].
        every: n.
    """

    def __init__(
        self,
        cache: Cache,
        backend: ModuleType,
        prompt: EndedPrompt,
        queries: list[list[Tensor]],
        log_sums: list[list[Tensor]],
        every: int,
    ) -> None:
        super().__init__(cache, backend, prompt)
        self._queries, self._log_sums, self._every = queries, log_sums, every

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        self._queries[layer_index].append(query[:: self._every] * scaling)
        self._seen: list[Tensor] = []
        attended = super().attend(layer_index, batch, query, tokens, scaling)
        self._log_sums[layer_index].append(torch.cat(self._seen, dim=-1)[..., :: self._every])
        return attended

    @override
    def look(self, scores: Tensor, weights: Tensor) -> None:
        self._seen.append(scores.amax(-1) - weights.amax(-1).log())


@dataclass
class Block:
    """The entries of one layer of a sequence, of which those that are new are matched, but for fixed ones."""

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
    """Which entries stay as they are, if there is room, bool [H, N]."""
    is_open: Tensor
    """Which tokens to come may be merged into, bool [H, N]: they stay as they are."""
    fitted: Tensor
    """Which have been matched before, bool [H, N]."""
    queries: Tensor
    """Reference queries times the factor on the scores, float32 [H, n, D]."""
    log_sums: Tensor
    """Log of the sum of exp of all scores of each query, float32 [H, n]."""

    @property
    def is_matched(self) -> Tensor:
        """Which entries are to be matched, bool [H, N]."""
        return self.exists & ~self.fixed & ~self.is_open & ~self.fitted

    def attention(self, head: int) -> Tensor:
        """Attention of a head's queries to its entries, 0 of those that are not matched, [n, N]."""
        logits = self.queries[head] @ self.key[head].T - self.log_sums[head, :, None]
        return logits.exp().masked_fill_(~self.is_matched[head], 0.0)

    def scores(self, every: int) -> Tensor:
        """Write scores of entries that are matched, and return all, [H, N]; +inf: it is fixed, -inf: there is none.

        Args:
            every: number of queries that each reference query stands for.
        """
        attention = (self.attention(head) for head in range(len(self.key)))
        received = torch.stack([(every * of_head.square().sum(0)).sqrt() for of_head in attention])
        held = self.layer.entry_metadata["score"].view(-1)
        held[self.place[self.is_matched]] = received[self.is_matched]
        scores = above_all(above_all(held[self.place], self.fixed), self.is_open)
        return scores.masked_fill(~self.exists, -torch.inf)

    def match(self, keep: Tensor, bias_bound: float, ridge: float) -> None:
        """Write biases and values of the entries that stay, bool [H, N], in place."""
        values, bias_pages = self.layer.value_pages.view(-1, self.value.shape[-1]), self.layer.bias
        assert bias_pages is not None
        for head, leaves in enumerate((self.is_matched & ~keep).any(-1).tolist()):
            kept = (self.is_matched & keep)[head].nonzero()[:, 0]
            if leaves and len(kept):
                place = self.place[head, kept]
                bias, value = matched(self.attention(head), self.value[head], kept, bias_bound, ridge)
                bias_pages.view(-1)[place] = bias.to(bias_pages.dtype)
                values[place] = value.to(values.dtype)


def matched(attention: Tensor, value: Tensor, kept: Tensor, bias_bound: float, ridge: float) -> tuple[Tensor, Tensor]:
    """Fit biases and values of kept entries to the attention to all, see `AttentionMatching`.

    Args:
        attention: of each query to all entries, 0 of those left out, [n, N].
        value: their values, [N, D].
        kept: indices of the kept ones, int64 [t].
        bias_bound: largest magnitude of a bias.
        ridge: weight of the deviation from no bias and from the own value.
    Returns:
        Their biases, [t], and their values, [t, D]; float64.
    """
    part, mass = attention[:, kept].double(), attention.double().sum(-1)
    weights = bounded_least_squares(part, mass, bias_bound, ridge)
    weighted = part * weights
    shares = weighted / (1 - mass + weighted.sum(-1))[:, None].clamp_min(1e-6)
    outputs, value = (attention @ value).double(), value.double()
    missing = outputs - shares @ value[kept]
    gram = shares.T @ shares
    gram.diagonal().add_(_pull(gram, ridge))
    return weights.log(), value[kept] + torch.linalg.solve(gram, shares.T @ missing)


def bounded_least_squares(attention: Tensor, mass: Tensor, bias_bound: float, ridge: float) -> Tensor:
    """Find the weights w that make each query's attention to kept entries, float64 [n, t], sum up to `mass`, [n]; [t].

    Primal-dual active sets: weights beyond a bound, or held at it by their slope, are set to it, the others solved for.
    """
    low, high = math.exp(-bias_bound), math.exp(bias_bound)
    gram, wanted = attention.T @ attention, attention.T @ mass
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
