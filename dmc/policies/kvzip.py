"""KVzip (arXiv:2505.23416): the entries that the model attends to when it repeats the context from its cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.compression.base import RunRecurrent
from dmc.config.settings import Count, NonNegative, checked_dataclass
from dmc.kernels.base import LayerCache, NewTokens
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import gather_pages, places
from dmc.kernels.probabilities import QUERY_BLOCK, softmax_with_sinks
from dmc.kernels.recurrent import run_layer
from dmc.kernels.windows import window_attention
from dmc.policies.base import Sum, above_all
from dmc.policies.budgets import keep_top
from dmc.policies.eviction import Eviction, EvictionPolicy
from dmc.policies.layer_attention import Cache, RotaryTables


@checked_dataclass(frozen=True, kw_only=True)
class KVzip(EvictionPolicy):
    """Keep the entries with the highest scores of the whole model, independent of later questions.

    When a prompt ends, the text so far is fed once more after it, `chunk` tokens c at a time, after an instruction to
    repeat it. An entry's score is the highest attention of any of these queries to it, among the sinks, the entries of
    c and the repetition up to the query,

        s_i = max over the group and queries j of softmax_i(q_j^T k_i / sqrt(d))

    This costs 2 to 3 times the prompt's own pass, and nothing but the scores stays in the cache. Differs from the
    authors' code: one instruction leads every chunk, and there is none without a tokenizer. A later turn repeats the
    tokens since the last repetition; entries from before keep their scores.
    """

    budget: Budget
    sinks: NonNegative = 4
    """First tokens that stay."""
    chunk: Count = 2048
    """Number of tokens that are repeated together."""
    lead: NonNegative = 8
    """Tokens before a chunk that announce it."""
    instruction: str | tuple[NonNegative, ...] = "\n\nRepeat the previous context exactly."
    """Text, or token ids, before each repetition."""

    evicts_decoding: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    sums: ClassVar[tuple[Sum, ...]] = ("score",)

    @property
    def serves_compressed(self) -> bool:
        """See `CachePolicy`: the second pass does not run gates."""
        return False

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """See `CachePolicy`; also the number of tokens whose entries have a score."""
        return (*super().fields(layout), Field("scored", torch.int32, "row"))

    @override
    def tokenized(self, tokenizer: Any) -> KVzip:
        policy = super().tokenized(tokenizer)
        if not isinstance(self.instruction, str):
            return policy
        ids = [] if tokenizer is None else tokenizer(self.instruction, add_special_tokens=False)["input_ids"]
        return dataclasses.replace(policy, instruction=tuple(ids))

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: RotaryTables) -> Reconstruction:
        return Reconstruction(cache, backend, self, rotary)


@dataclass
class EndedPrompt:
    """A prompt that ends in a pass and exceeds its budget."""

    row: int
    rows: Tensor
    """Its cache row on the device, int64 [1]."""
    num_tokens: int
    limit: int
    longest: list[int]
    """Entries of each layer's longest head."""


class Reconstruction(Eviction):
    """Appends whole prompts, and compresses all layers together after a second pass."""

    policy: KVzip

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        if layer_index == 0:
            self._ended: list[EndedPrompt] = []  # in this pass
        return super().attend(layer_index, batch, query, tokens, scaling)

    def _end_prompt(self, layer_index: int, batch: ForwardBatch, index: int, scaling: float) -> None:
        row, tokens_seen = batch.rows[index], batch.ends[index]
        self._prompts.pop((layer_index, row), None)
        limit = self._set_limit(layer_index, row, tokens_seen)
        if layer_index == 0 and tokens_seen > limit:
            longest = [max(heads) for heads in self._held(layer_index, row, tokens_seen)]
            self._ended.append(EndedPrompt(row, batch.row_index[index : index + 1], tokens_seen, limit, longest))

    @override
    def finish(self, feed: Callable[[list[int], int, Any], None]) -> None:
        policy, cache, scored = self.policy, self.cache, self.cache.fields["scored"]
        layers = [cache.layer(index) for index in range(cache.layout.num_layers)]
        for prompt in self._ended:
            rows, num_tokens, tokens = prompt.rows, prompt.num_tokens, self.tokens[prompt.row]
            for begin in range(int(scored[0, prompt.row]), num_tokens, policy.chunk):  # forks share what is scored
                end = min(begin + policy.chunk, num_tokens)
                repetition = Repetition(
                    cache, self.backend, rows, num_tokens, prompt.longest, range(begin, end), policy.sinks
                )
                feed([*policy.instruction, *tokens[max(0, begin - policy.lead) : end]], num_tokens, repetition)
            scored[:, prompt.row] = num_tokens
            scores = [self._scores(layer, prompt, count) for layer, count in zip(layers, prompt.longest, strict=True)]
            total = prompt.limit * cache.lengths[:, prompt.row].numel()
            keep = keep_top(torch.cat([of_layer.flatten() for of_layer in scores]), total)
            counts = [of_layer.numel() for of_layer in scores]
            for layer, kept, of_layer in zip(layers, keep.split(counts), scores, strict=True):
                self.backend.compact(layer, rows, kept.view_as(of_layer))

    def _scores(self, layer: LayerCache, prompt: EndedPrompt, num_entries: int) -> Tensor:
        """Return the scores of a sequence's entries, [1, H, N]: +inf of sinks, -inf where there is no entry."""
        positions, scores = self.backend.read_metadata(layer, prompt.rows, ["position", "score"], num_entries)
        scores = scores.masked_fill(positions < self.policy.sinks, torch.inf)
        if self.policy.protect:
            scores = above_all(scores, self._protector.chosen(prompt.row, positions, prompt.limit))
        return scores.masked_fill(positions < 0, -torch.inf)


@dataclass
class Repetition:
    """A pass that attends to a sequence's entries and to itself, scores them, and appends nothing."""

    cache: Cache
    backend: ModuleType
    rows: Tensor
    """Cache row of the sequence, int64 [1]."""
    num_seen: int
    """Number of its tokens."""
    num_entries: list[int]
    """Entries of the longest head of each layer without a window."""
    chunk: range
    """Positions of the tokens that are repeated."""
    sinks: int

    def run_recurrent(self, layer_index: int, run: RunRecurrent, hidden_states: Tensor) -> Tensor:
        """Run a layer without attention, [1, T, hidden], from its state, which stays."""
        layout = self.cache.layout
        batch = ForwardBatch([int(self.rows)], [self.num_seen], [hidden_states.shape[1]], hidden_states.device)
        place = layout.places[layer_index] - layout.num_paged_layers
        return run_layer(run, hidden_states[0], batch, self.cache.fields, place, writes=False)[None]

    def attend_plain(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        attention_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from [1, H_q, T, D], already rotated, to the cache and to keys [1, H, T, D] up to the query's own."""
        index = self.cache.layout.places[layer_index]
        layer, ring = self.cache.layer(index), self.cache.layout.window_of(index)
        if ring is not None:
            batch = ForwardBatch([int(self.rows)], [self.num_seen], [query.shape[2]], query.device)
            states, tokens = query[0].transpose(0, 1), NewTokens(key[0].transpose(0, 1), value[0].transpose(0, 1))
            return window_attention(states, layer, batch, tokens, ring, scaling).transpose(0, 1)[None]
        tables = layer.block_tables[self.rows]
        num_entries, num_new = self.num_entries[index], query.shape[2]
        positions = self.backend.read_metadata(layer, self.rows, ["position"], num_entries)[0]
        exists, is_sink = positions >= 0, (positions >= 0) & (positions < self.sinks)
        keys, values = (
            torch.cat((held.masked_fill(~exists[..., None], 0), new), dim=2)[0].float()
            for held, new in (
                (gather_pages(layer.key_pages, tables, num_entries, layer.key_scales), key),
                (gather_pages(layer.value_pages, tables, num_entries, layer.value_scales), value),
            )
        )
        repeated = (positions >= self.chunk.start) & (positions < self.chunk.stop)
        competing = torch.nn.functional.pad(repeated | is_sink, (0, num_new), value=True)[0]  # [H, N + T]
        values = torch.cat(
            (values, competing[..., None]), dim=-1
        )  # yields their share of the attention with the output
        grouped, outputs = query[0].float().unflatten(0, (len(keys), -1)) * scaling, []
        order = torch.arange(num_new, device=query.device)
        best = torch.zeros(positions.shape[1:], device=query.device)
        for begin in range(0, num_new, QUERY_BLOCK):
            block = grouped[:, :, begin : begin + QUERY_BLOCK]
            ahead = order > order[begin : begin + block.shape[2], None]
            hidden = torch.cat((~exists[0][:, None].expand(-1, len(ahead), -1), ahead.expand(len(keys), -1, -1)), -1)
            scores = (block @ keys[:, None].transpose(-1, -2)).masked_fill_(hidden[:, None], -torch.inf)
            weights = softmax_with_sinks(scores[None], layer.sinks)[0]
            output, among = (weights @ values[:, None]).split((query.shape[-1], 1), dim=-1)
            outputs.append(output)
            best = torch.maximum(best, (weights[..., :num_entries] / among.clamp_min(1e-30)).amax((1, 2)))
        slots = torch.arange(num_entries, device=query.device)[None, None]
        place = places(tables, slots, layer.block_size)
        scores = torch.where(repeated, best, 0.0)  # they have none yet; 0 beyond the length, wherever that leads
        layer.entry_metadata["score"].view(-1).index_put_((place,), scores, accumulate=True)
        return torch.cat(outputs, dim=2).flatten(0, 1)[None].to(query.dtype)
