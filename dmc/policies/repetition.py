"""A second reading: when a prompt ends the model repeats the text from its cache, and how it attends says what stays.

KVzip takes scores of entries from it, Attention Matching the queries that its result is fitted to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from dmc.budget import Budget
from dmc.compression import rotate
from dmc.config.settings import Count, NonNegative, checked_dataclass
from dmc.kernels.base import LayerCache, NewTokens
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.pages import gather_pages, slots_below
from dmc.kernels.probabilities import QUERY_BLOCK, softmax_with_sinks
from dmc.kernels.reference import as_read
from dmc.kernels.windows import window_attention
from dmc.policies.eviction import Eviction, EvictionPolicy
from dmc.policies.layer_attention import Cache, CacheAttention


@checked_dataclass(frozen=True, kw_only=True)
class RepetitionPolicy(EvictionPolicy):
    """Compresses all layers together when a prompt ends, by how the model attends while it repeats the text so far.

    The text is fed once more after itself, `chunk` tokens at a time, after an instruction to repeat it. This costs 2 to
    3 times the prompt's own pass; no token of it enters the cache.
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

    @override
    def tokenized(self, tokenizer: Any) -> Self:
        policy = super().tokenized(tokenizer)
        if not isinstance(self.instruction, str):
            return policy
        ids = [] if tokenizer is None else tokenizer(self.instruction, add_special_tokens=False)["input_ids"]
        return dataclasses.replace(policy, instruction=tuple(ids))


@dataclass
class EndedPrompt:
    """A prompt that ends in a pass and exceeds its budget."""

    row: int
    rows: Tensor
    """Its cache row on the device, int64 [1]."""
    num_tokens: int
    tokens_seen: Tensor
    """The same on the device, int64 [1]."""
    limit: int
    longest: list[int]
    """Entries of each layer's longest head when the pass has ended; an upper bound as long as it has not."""


class SecondReading(Eviction):
    """Appends whole prompts; after the pass it has each repeated, and compresses all layers together."""

    policy: RepetitionPolicy

    def first_repeated(self, prompt: EndedPrompt) -> int:
        """Return the position of the first token to repeat."""
        raise NotImplementedError

    def repetition(self, prompt: EndedPrompt, chunk: range) -> Repetition:
        """Return what attends while tokens at some positions are repeated."""
        raise NotImplementedError

    def compress(self, prompt: EndedPrompt) -> None:
        """Compress all layers of a sequence."""
        raise NotImplementedError

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
            longest, only = [max(heads) for heads in self._held(0, row, tokens_seen)], slice(index, index + 1)
            numbers = tokens_seen, batch.tokens_seen[only], limit, longest
            self._ended.append(EndedPrompt(row, batch.row_index[only], *numbers))

    @override
    def finish(self, feed: Callable[[list[int], int, int, CacheAttention], None]) -> None:
        policy = self.policy
        for prompt in self._ended:
            tokens, end = self.tokens[prompt.row], prompt.num_tokens
            if not self._has_positions:  # gates have decided
                prompt.longest = self.cache.lengths[:, prompt.row].amax(-1).tolist()
            for begin in range(self.first_repeated(prompt), end, policy.chunk):
                chunk = range(begin, min(begin + policy.chunk, end))
                repeated = [*policy.instruction, *tokens[max(0, begin - policy.lead) : chunk.stop]]  # type: ignore[list-item]
                feed(repeated, prompt.row, end, self.repetition(prompt, chunk))
            self.compress(prompt)


class Repetition(CacheAttention):
    """A pass that attends to a sequence's entries and to its own tokens, and appends nothing.

    Args:
        cache: the engine's cache.
        backend: kernel module.
        prompt: what is repeated.
    """

    def __init__(self, cache: Cache, backend: ModuleType, prompt: EndedPrompt) -> None:
        super().__init__(cache, backend)
        self.prompt = prompt

    def look(self, scores: Tensor, weights: Tensor) -> None:
        """See what some queries give entries, raw recent tokens, and the pass's own tokens, [H, group, n, keys] each.

        Args:
            scores: q k^T with scaling and biases.
            weights: their attention.
        """

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        layer, rows, num_entries = self.cache.layer(layer_index), self.prompt.rows, self.prompt.longest[layer_index]
        tables, held = layer.block_tables[rows], slots_below(layer.lengths[rows], num_entries)  # [1, H, N]
        raw, new_value = self._held_back(layer, batch), tokens.value.transpose(0, 1)
        new_key = tokens.key if batch.rotary is None else rotate(tokens.key, *batch.query_rotary)
        keys, values = (
            torch.cat((states.masked_fill(~held[..., None], 0)[0], *others), dim=1)
            for states, *others in (
                (gather_pages(layer.key_pages, tables, num_entries, layer.key_scales), raw[0], new_key.transpose(0, 1)),
                (gather_pages(layer.value_pages, tables, num_entries, layer.value_scales), raw[1], new_value),
            )
        )
        keys, values, num_new = keys.float(), values.float(), len(query)
        num_others = keys.shape[1] - num_entries
        added = torch.zeros_like(keys[..., 0])
        if layer.bias is not None:
            added[:, :num_entries] = gather_pages(layer.bias, tables, num_entries)[0]
        added[:, :num_entries].masked_fill_(~held[0], -torch.inf)
        grouped = query.transpose(0, 1).float().unflatten(0, (len(keys), -1)) * scaling
        order, outputs = torch.arange(num_others, device=query.device) - (num_others - num_new), []
        for begin in range(0, num_new, QUERY_BLOCK):
            block = grouped[:, :, begin : begin + QUERY_BLOCK]
            scores = block @ keys[:, None].transpose(-1, -2) + added[:, None, None]
            ahead = order > torch.arange(begin, begin + block.shape[2], device=query.device)[:, None]
            scores[..., num_entries:].masked_fill_(ahead, -torch.inf)
            weights = softmax_with_sinks(scores[None], layer.sinks)[0]
            self.look(scores, weights)
            outputs.append(weights @ values[:, None])
        return torch.cat(outputs, dim=2).flatten(0, 1).transpose(0, 1).to(query.dtype)

    @override
    def attend_in_window(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        layer, window = self.cache.layer(layer_index), self.cache.layout.window_of(layer_index)
        assert window is not None
        return window_attention(query, layer, batch, as_read(layer, tokens), window, scaling)

    def _held_back(self, layer: LayerCache, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return keys, rotated, and values of the prompt's last tokens that a delayed gate holds back, [H, W, D]."""
        delay, end = self.cache.layout.delay, self.prompt.num_tokens
        if delay == 0 or batch.rotary is None:
            nothing = layer.value_pages.new_empty(layer.lengths.shape[1], 0, layer.value_pages.shape[-1])
            return nothing, nothing
        positions = torch.arange(max(0, end - delay), end, device=self.prompt.rows.device)
        place, count = positions % layer.history_key.shape[2], len(positions)
        key, value = (ring[self.prompt.row][:, place] for ring in (layer.history_key, layer.history_value))
        turned = rotate(key.transpose(0, 1), *(table[delay - count : delay] for table in batch.rotary))
        return turned.transpose(0, 1), value
