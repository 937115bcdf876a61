"""Runs OmniKV: filter layers choose tokens of the prompt, the layers after them read those and all generated ones."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmc.kernels.base import NewTokens
from dmc.kernels.probabilities import attention_probabilities
from dmc.kernels.reference import gather_pages
from dmc.policies.omnikv import OmniKV, selection_scores, selector_weights
from dmc.policies.reading import top_positions
from dmc.runtime.cache_attention import CacheAttention, Group
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.policy.omnikv_prefill import SparsePrefill
from dmc.runtime.policy.omnikv_store import OmniKVStore
from dmc.runtime.policy.reading import backend_for_pages, small_page_ids, small_pages, with_tail
from dmc.runtime.sequence import Phase


@dataclass
class Choice:
    """What a filter layer has chosen for the sequences that decode in this pass."""

    positions: Tensor
    """Tokens of the prompt, ascending, int64 [S, k]; anything beyond the count."""
    counts: Tensor
    """How many of them, int64 [S]."""
    is_new: Tensor | None = None
    """Whether it differs from the last choice, bool [S]; None: it always may."""
    reads: tuple[Tensor, Tensor] | None = None
    """With all generated tokens, int64 [S, K], and how many that are, int32 [S, 1]; once a layer has asked."""


class OmniKVAttention(CacheAttention):
    """Attends to everything in full layers, and to the choice of a filter layer in sparse ones.

    Args:
        cache: storage; its side store keeps the queries that choose.
        backend: kernel module.
        policy: fitted to the model.
    """

    def __init__(self, cache: PagedCache, backend: ModuleType, policy: OmniKV) -> None:
        super().__init__(cache, backend)
        assert isinstance(cache.notes, OmniKVStore)
        self.policy, self._store = policy, cache.notes
        self._runs = policy.sparse_layers(cache.layout.num_layers)
        self._entry_backend = backend_for_pages(backend, cache.layout, 1)
        self._prefill = SparsePrefill(policy, self._entry_backend) if policy.prefill == "sparse" else None
        self._choice: Choice | None = None

    def attend(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `CacheAttention.attend`."""
        is_prompt, is_sparse = Phase.PROMPT in group.phase, self.policy.filter_of(layer_index) is not None
        if is_sparse:
            read = self.read_prompt if is_prompt else self.read_choice
            return read(layer_index, group, query, tokens, scaling)
        seen = self.append(layer_index, tokens)
        if layer_index in self._runs:
            self._store.remember(layer_index, group, query)
            if not is_prompt:
                return self.choose(layer_index, group, query, scaling)
            self._store.forget_choice(layer_index, group)
            if self._prefill is not None:
                self._prefill.choose(self.cache.layer(layer_index), group, query, scaling)
        return self.attend_to_all(layer_index, group, query, seen, scaling)

    def read_prompt(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """Feed tokens of prompts to a sparse layer, [S, H_q, n, D]."""
        seen = self.append(layer_index, tokens)
        if self._prefill is None:
            return self.attend_to_all(layer_index, group, query, seen, scaling)
        layer = self.cache.layer(layer_index)
        pages = layer.key_pages, layer.value_pages, layer.block_tables[group.rows]
        return self._prefill.attend(pages, group.places, query, scaling)

    def read_choice(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """Feed generated tokens to a sparse layer, [S, H_q, 1, D]."""
        self.append(layer_index, tokens)
        assert self._choice is not None
        if self._choice.reads is None:
            self._choice.reads = self._with_generated(group, self._choice)
        layer, (positions, lengths) = self.cache.layer(layer_index), self._choice.reads
        attended = self._entry_backend.paged_attention(
            query[:, :, 0],
            small_pages(layer.key_pages, 1),
            small_pages(layer.value_pages, 1),
            small_page_ids(layer.block_tables[group.rows], positions[:, None], layer.block_size),
            lengths.expand(-1, layer.lengths.shape[1]),
            scaling,
        )
        return attended[:, :, None]

    def _with_generated(self, group: Group, choice: Choice) -> tuple[Tensor, Tensor]:
        """Return what layers read under a choice: see `Choice.reads`."""
        prompt, end = self._prompts(group), group.positions[:, -1] + 1
        most_generated = max(place.begin + 1 - place.prompt_end for place in group.places)
        width = choice.positions.shape[1] + most_generated
        positions = with_tail(choice.positions, choice.counts, prompt, end, width)
        return positions, (choice.counts + end - prompt).int()[:, None]

    def choose(self, layer_index: int, group: Group, query: Tensor, scaling: float) -> Tensor:
        """Attend from generated tokens in a filter layer, and choose for the layers after it."""
        prompt = self._prompts(group)
        attended, scores = self._look(layer_index, group, query, prompt, scaling)
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= prompt[:, None], -torch.inf)
        counts = [self.policy.num_chosen(place.prompt_end) for place in group.places]
        num_chosen = torch.tensor(counts, device=prompt.device)
        choice = Choice(top_positions(scores, num_chosen, max(counts)), num_chosen)
        if self.policy.lazy_reload is not None:
            self._prefer_last_choice(layer_index, group, choice, self.policy.lazy_reload)
        self._choice = choice
        return attended

    def _look(
        self, layer_index: int, group: Group, query: Tensor, prompt: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Attend to everything, [S, H_q, 1, D], and score the tokens of the prompts, [S, N]."""
        layer, rows = self.cache.layer(layer_index), group.rows
        longest = max(place.prompt_end for place in group.places)
        most_seen = 1 + max(place.begin for place in group.places)
        is_last = self.policy.selector == "last" and not self.policy.raw_scores
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        answer = self.backend.paged_attention(
            query[:, :, 0],
            *pages,
            layer.lengths,
            scaling,
            rows=rows,
            return_scores=is_last,
            num_scores=-(-most_seen // self.cache.block_size) * self.cache.block_size,
        )
        if is_last:  # softmax over everything, normalised again, is softmax over the prompt
            attended, attention = answer[0], answer[1][..., :longest]
            is_prompt = torch.arange(longest, device=rows.device) < prompt[:, None]
            attention = attention * is_prompt[:, None]
            total = attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
            return attended[:, :, None], (attention / total).amax(1)
        if self.policy.raw_scores:
            key = gather_pages(layer.key_pages, layer.block_tables[rows], longest).float()
            scores = query.float().view(len(rows), key.shape[1], -1, query.shape[-1]) @ key.transpose(-1, -2) * scaling
            return answer[:, :, None], scores.amax((1, 2))
        queries, positions = self._store.queries(layer_index, group)
        slots = (positions + 1).clamp_min(1).minimum(prompt[:, None])[:, None].expand(-1, layer.lengths.shape[1], -1)
        weights = selector_weights(positions[:, -1:] - positions, self.policy.selector) * (positions >= 0)
        scores, begin = torch.zeros(len(rows), longest, device=rows.device), 0
        for block in attention_probabilities(queries, layer, rows, slots, scaling):
            end = begin + block.shape[3]
            scores[:, : block.shape[-1]] += selection_scores(block.flatten(1, 2), weights[:, begin:end])
            begin = end
        return answer[:, :, None], scores

    def _prefer_last_choice(self, layer_index: int, group: Group, choice: Choice, threshold: float) -> None:
        """Go back to the last choice of sequences where it has more than a share of the new one."""
        width = choice.positions.shape[1]
        exists = torch.arange(width, device=group.rows.device) < choice.counts[:, None]
        last = self._store.last_choice(layer_index, group, width)
        longest = max(place.prompt_end for place in group.places)
        was_chosen = torch.zeros(len(last), longest + 1, dtype=torch.bool, device=last.device)
        was_chosen.scatter_(1, last.where(last >= 0, longest), True)
        common = (was_chosen.gather(1, choice.positions) & exists).sum(-1)
        choice.is_new = common <= threshold * choice.counts
        choice.positions = choice.positions.where(choice.is_new[:, None], last.clamp_min(0))
        self._store.keep_choice(layer_index, group, choice.positions.where(exists, -1))

    def _prompts(self, group: Group) -> Tensor:
        """Length of each sequence's prompt, what came before it included, int64 [S]."""
        return torch.tensor([place.prompt_end for place in group.places], device=group.rows.device)
