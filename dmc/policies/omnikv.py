"""OmniKV (ICLR 2025, https://openreview.net/forum?id=ulCAPXYXfa): a few layers choose what the others read.

The options, their arithmetic, then what attends: `OmniKVAttention` over one pool, `SparsePrefill` within prompts, and
`OffloadedOmniKV` over two.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmc.budget import Budget
from dmc.kernels.base import LayerCache, NewTokens, Seen
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import gather_pages, gather_slots, places, small_pages
from dmc.kernels.probabilities import attention_probabilities
from dmc.policies.attention import Cache, CacheAttention, Group, Phase, Place, RotaryTables
from dmc.policies.reading import ReadingPolicy, backend_for_pages, top_positions, with_tail

Selector = Literal["last", "uniform", "exponential"]
Prefill = Literal["full", "sparse"]


@dataclass(frozen=True, kw_only=True)
class OmniKV(ReadingPolicy):
    """Let filter layers choose, at each generated token, the prompt tokens that the layers after them read.

    The layers before the first filter layer, the filter layers and the one after each read everything. Any other layer
    reads what the nearest filter layer before it has chosen, the same tokens in all heads, and all generated ones. A
    filter layer chooses the budget of the prompt by the attention of its last queries, softmax over the prompt alone,
    maximum over all query heads, summed over the queries.

    Differs from the authors' code: attention is normalised for the "last" selector too, unless `raw_scores`; queries of
    a window keep their own positions, and prompt tokens among them are candidates like others.

    Raises:
        ValueError: an option is out of range, or both or neither of `budget` and `memory` are given.
    """

    budget: Budget = None  # type: ignore[assignment]
    """Prompt tokens that are chosen; a ratio counts the prompt."""
    memory: float | None = None
    """In place of a budget: the share of a full cache in fast memory, full layers included (Mem%)."""
    filter_layers: tuple[int, ...] | None = None
    """Ascending, from 0; None: `default_filter_layers`."""
    selector: Selector = "last"
    """Which queries choose: the newest, or the last `window` with weights that are equal or halve with age."""
    window: int = 16
    """Queries of the uniform and the exponential selector."""
    raw_scores: bool = False
    """Whether the last query's attention is left unnormalised, as in the authors' code."""
    lazy_reload: float | None = None
    """Keep the old choice if more than this share of the new one is in it (0.4 in the authors' code); None: never."""
    offload: bool = False
    """Whether the prompt's entries of layers that do not read all of them lie in the host's memory."""
    prefill: Prefill = "full"
    """sparse: prompts are read in chunks, and layers choose for a chunk as they do for a generated token."""
    chunk: int = 1024
    """Tokens of a chunk of a sparse prefill."""
    chunks_read: int = 2
    """Tokens before the chunk that are chosen, in chunks (r in the paper); by the uniform selector over its queries."""

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.memory is None):
            raise ValueError(f"budget={self.budget}, memory={self.memory}: give exactly one")
        if self.memory is not None and not 0 < self.memory <= 1:
            raise ValueError(f"memory={self.memory}: expected a share of the cache in (0, 1], such as 0.3")
        if self.filter_layers is not None:
            object.__setattr__(self, "filter_layers", tuple(self.filter_layers))
            check_filter_layers(self.filter_layers)
        if self.selector not in ("last", "uniform", "exponential"):
            raise ValueError(f"selector={self.selector!r}: expected 'last', 'uniform' or 'exponential'")
        if self.raw_scores and self.selector != "last":
            raise ValueError(f"raw_scores=True needs selector='last', not {self.selector!r}")
        if self.lazy_reload is not None and not 0 <= self.lazy_reload < 1:
            raise ValueError(f"lazy_reload={self.lazy_reload}: expected a share in [0, 1), such as 0.4, or None")
        if self.prefill not in ("full", "sparse"):
            raise ValueError(f"prefill={self.prefill!r}: expected 'full' or 'sparse'")
        for name in ("window", "chunk", "chunks_read"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number >= 1")

    @property
    def prompt_chunk(self) -> int | None:
        """See `CachePolicy`."""
        return self.chunk if self.prefill == "sparse" else None

    @property
    def can_fork(self) -> bool:
        """See `CachePolicy`."""
        return not self.offload

    @property
    def num_queries(self) -> int:
        """Queries that choose."""
        return 1 if self.selector == "last" else self.window

    def fitted(self, num_layers: int, block_size: int) -> OmniKV:
        """See `CachePolicy.fitted`: fills in filter layers and budget."""
        filters = default_filter_layers(num_layers) if self.filter_layers is None else self.filter_layers
        if filters[-1] >= num_layers:
            raise ValueError(f"filter_layers={filters}: the model has layers 0 to {num_layers - 1}")
        budget = self.budget
        if self.memory is not None:
            share = prompt_share(self.memory, num_layers, filters)
            budget = Budget(ratio=max(1.0, 1 / share))
        fitted = copy.copy(self)  # not built anew: default filter layers of a shallow model lie next to each other
        for name, value in (("filter_layers", filters), ("budget", budget), ("memory", None)):
            object.__setattr__(fitted, name, value)
        return fitted

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """The queries that choose, where there are several, and the last choice, where it may stay."""
        num_filters, kept = len(self.sparse_layers(layout.num_layers)), []
        if self.num_queries > 1:
            shape = (self.num_queries, layout.num_query_heads, layout.head_dim)
            kept += [Field("queries", layout.dtype, "row", shape, num_layers=num_filters)]
        if self.lazy_reload is not None:
            kept += [Field("chosen", torch.int32, "row", (0,), start=-1, num_layers=num_filters)]
        return tuple(kept)

    def offloaded(self, num_layers: int) -> dict[int, list[int]]:
        """See `CachePolicy.offloaded`."""
        return self.sparse_layers(num_layers) if self.offload else {}

    def attention(self, cache: Cache, backend: ModuleType, rotary: RotaryTables) -> OmniKVAttention:
        """See `CachePolicy.attention`."""
        return (OffloadedOmniKV if cache.slow is not None else OmniKVAttention)(cache, backend, self)

    def num_chosen(self, prompt_length: int) -> int:
        """Prompt tokens that a layer reads which does not read all."""
        return min(self.budget.entries(prompt_length), prompt_length)

    def filter_of(self, layer_index: int) -> int | None:
        """Return the filter layer, of a fitted policy, that chooses for a layer; None: the layer reads everything."""
        assert self.filter_layers is not None
        if reads_all(layer_index, self.filter_layers):
            return None
        return max(index for index in self.filter_layers if index < layer_index)

    def sparse_layers(self, num_layers: int) -> dict[int, list[int]]:
        """List the layers that each filter layer, of a fitted policy, chooses for; those of none are left out."""
        runs: dict[int, list[int]] = {}
        for layer_index in range(num_layers):
            if (chooser := self.filter_of(layer_index)) is not None:
                runs.setdefault(chooser, []).append(layer_index)
        return runs


def default_filter_layers(num_layers: int) -> tuple[int, ...]:
    """Scale layers 2, 8 and 18 of 32 (Llama-3-8B in the paper) to any depth, rounded down."""
    return tuple(sorted({num_layers * layer // 32 for layer in (2, 8, 18)}))


def check_filter_layers(filter_layers: Sequence[int]) -> None:
    """Refuse filter layers that choose for nobody.

    Raises:
        ValueError: none, negative, not ascending, or one right after another.
    """
    gaps = [after - before for before, after in itertools.pairwise(filter_layers)]
    if not filter_layers or filter_layers[0] < 0 or any(gap < 2 for gap in gaps):
        raise ValueError(
            f"filter_layers={tuple(filter_layers)}: expected ascending layers, from 0, at least one and none next to "
            "another (the layer after a filter layer reads everything), such as (2, 8, 18)"
        )


def reads_all(layer_index: int, filter_layers: Sequence[int]) -> bool:
    """Whether a layer reads everything: it lies before all filter layers, or is one, or comes right after one."""
    return layer_index < filter_layers[0] or layer_index in filter_layers or layer_index - 1 in filter_layers


def full_share(num_layers: int, filter_layers: Sequence[int]) -> float:
    """Share of the layers that read everything: (2 m + L_0) / L for m filter layers, none of them the last layer."""
    return sum(reads_all(index, filter_layers) for index in range(num_layers)) / num_layers


def memory_share(chosen: float, num_layers: int, filter_layers: Sequence[int]) -> float:
    """Share of the prompt's entries in fast memory (Mem%) when a share `chosen` of its tokens is chosen."""
    full = full_share(num_layers, filter_layers)
    return full + chosen * (1 - full)


def prompt_share(memory: float, num_layers: int, filter_layers: Sequence[int]) -> float:
    """Share of a prompt's tokens to choose so that `memory_share` is `memory`; 1 where every layer reads all.

    Raises:
        ValueError: the layers that read everything take as much already.
    """
    full = full_share(num_layers, filter_layers)
    if full == 1:
        return 1.0
    if memory <= full:
        raise ValueError(
            f"memory={memory}: the layers that read everything hold {full:.4g} of the cache with "
            f"filter_layers={tuple(filter_layers)} of {num_layers} layers; give more, or fewer filter layers"
        )
    return (memory - full) / (1 - full)


def tokens_for_memory(memory: float, prompt_length: int, num_layers: int, filter_layers: Sequence[int]) -> int:
    """Prompt tokens to choose for a share of the cache in fast memory, rounded down, at least 1.

    Raises:
        ValueError: see `prompt_share`.
    """
    return max(1, math.floor(prompt_share(memory, num_layers, filter_layers) * prompt_length + 1e-6))


def selector_weights(ages: Tensor, selector: Selector) -> Tensor:
    """Weights of queries by age, 0 for the newest: 1 for it alone, 1 for all, or 1/2 for it and half for each before.

    Args:
        ages: int [...].
        selector: which.
    Returns:
        Float32, shape of `ages`.
    """
    if selector == "last":
        return (ages == 0).float()
    if selector == "uniform":
        return (ages >= 0).float()
    return 0.5 ** (ages + 1).float()


def selection_scores(attention: Tensor, weights: Tensor) -> Tensor:
    """Maximum over query heads, summed over queries with weights.

    Args:
        attention: [S, H_q, queries, N].
        weights: [S, queries].
    Returns:
        [S, N].
    """
    return (attention.amax(1) * weights[..., None]).sum(1)


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
    """Attends to everything in full layers, and to the choice of a filter layer in sparse ones."""

    def __init__(self, cache: Cache, backend: ModuleType, policy: OmniKV) -> None:
        super().__init__(cache, backend)
        self.policy = policy
        self._runs = policy.sparse_layers(cache.layout.num_layers)
        self._filter = {layer: i for i, layer in enumerate(self._runs)}
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
            self._remember(layer_index, group, query)
            if not is_prompt:
                return self.choose(layer_index, group, query, scaling)
            if "chosen" in self.cache.fields:
                self.cache.fields["chosen"][self._filter[layer_index], group.rows] = -1
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
            places(layer.block_tables[group.rows], positions[:, None], layer.block_size).int(),
            lengths.expand(-1, layer.lengths.shape[1]),
            scaling,
        )
        return attended[:, :, None]

    def _with_generated(self, group: Group, choice: Choice) -> tuple[Tensor, Tensor]:
        """Return what layers read under a choice: see `Choice.reads`."""
        prompt, end = group.prompt_ends, group.positions[:, -1] + 1
        most_generated = max(place.begin + 1 - place.prompt_end for place in group.places)
        width = choice.positions.shape[1] + most_generated
        positions = with_tail(choice.positions, choice.counts, prompt, end, width)
        return positions, (choice.counts + end - prompt).int()[:, None]

    def choose(self, layer_index: int, group: Group, query: Tensor, scaling: float) -> Tensor:
        """Attend from generated tokens in a filter layer, and choose for the layers after it."""
        prompt = group.prompt_ends
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
        wanted: dict[str, Any] = {"return_scores": is_last, "num_scores": self.whole_pages(most_seen)}
        answer = self.attend_once(layer_index, group, query, scaling, **wanted)
        if is_last:  # softmax over everything, normalised again, is softmax over the prompt
            attended, attention = answer[0], answer[1][..., :longest]
            is_prompt = torch.arange(longest, device=rows.device) < prompt[:, None]
            attention = attention * is_prompt[:, None]
            total = attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
            return attended, (attention / total).amax(1)
        if self.policy.raw_scores:
            key = gather_pages(layer.key_pages, layer.block_tables[rows], longest).float()
            scores = query.float().view(len(rows), key.shape[1], -1, query.shape[-1]) @ key.transpose(-1, -2) * scaling
            return answer, scores.amax((1, 2))
        queries, positions = self._queries(layer_index, group)
        slots = (positions + 1).clamp_min(1).minimum(prompt[:, None])[:, None].expand(-1, layer.lengths.shape[1], -1)
        weights = selector_weights(positions[:, -1:] - positions, self.policy.selector) * (positions >= 0)
        scores, begin = torch.zeros(len(rows), longest, device=rows.device), 0
        for block in attention_probabilities(queries, layer, rows, slots, scaling):
            end = begin + block.shape[3]
            scores[:, : block.shape[-1]] += selection_scores(block.flatten(1, 2), weights[:, begin:end])
            begin = end
        return answer, scores

    def _remember(self, layer_index: int, group: Group, query: Tensor) -> None:
        """Keep the last queries [S, H_q, n, D] of a filter layer, if more than the newest one choose."""
        window = self.policy.num_queries
        if window > 1:  # the query at position p lies at p % W
            place = group.rows[:, None], group.positions[:, -window:] % window
            self.cache.fields["queries"][self._filter[layer_index]][place] = query[:, :, -window:].transpose(1, 2)

    def _queries(self, layer_index: int, group: Group) -> tuple[Tensor, Tensor]:
        """Return a filter layer's last queries, oldest first, [S, H_q, W, D], and their positions, < 0 for none."""
        window = self.policy.num_queries
        positions = group.positions[:, -1:] + torch.arange(1 - window, 1, device=group.rows.device)
        queries = self.cache.fields["queries"][self._filter[layer_index]]
        return queries[group.rows[:, None], positions % window].transpose(1, 2), positions

    def _prefer_last_choice(self, layer_index: int, group: Group, choice: Choice, threshold: float) -> None:
        """Go back to the last choice of sequences where it has more than a share of the new one."""
        width = choice.positions.shape[1]
        exists = torch.arange(width, device=group.rows.device) < choice.counts[:, None]
        every = self.cache.fields.widen("chosen", width)[self._filter[layer_index]]
        last = every[group.rows, :width].long()
        longest = max(place.prompt_end for place in group.places)
        was_chosen = torch.zeros(len(last), longest + 1, dtype=torch.bool, device=last.device)
        was_chosen.scatter_(1, last.where(last >= 0, longest), True)
        common = (was_chosen.gather(1, choice.positions) & exists).sum(-1)
        choice.is_new = common <= threshold * choice.counts
        choice.positions = choice.positions.where(choice.is_new[:, None], last.clamp_min(0))
        every[group.rows, :width] = choice.positions.where(exists, -1).to(every.dtype)


Pages = tuple[Tensor, Tensor, Tensor]
"""Keys and values, [N, block, D] each, and the tables of S sequences, int32 [S, H, M]."""


class SparsePrefill:
    """Reads prompts in chunks (OmniKV-prefill); exact while what came before a chunk is no longer than what it reads.

    Args:
        policy: how long chunks are and how much they read.
        backend: kernel module that serves pages of one entry.
    """

    def __init__(self, policy: OmniKV, backend: ModuleType) -> None:
        self._policy, self._backend = policy, backend
        self._chosen: dict[int, list[Tensor]] = {}  # of the latest filter layer: by row, positions for each chunk

    def choose(self, layer: LayerCache, group: Group, query: Tensor, scaling: float) -> None:
        """Choose for every chunk, by all of its queries alike; the new tokens are in the layer already."""
        for place, rows, own in zip(group.places, group.rows.split(1), query.split(1), strict=True):
            chosen = []
            for begin, chunk in self._chunks(place, own):
                chosen.append(self._choose(layer, rows, begin, chunk, scaling))
            self._chosen[place.row] = chosen

    def attend(self, pages: Pages, where: list[Place], query: Tensor, scaling: float) -> Tensor:
        """Attend in a sparse layer from each chunk to what was chosen for it and to its own tokens, [S, H_q, n, D]."""
        key_pages, value_pages, tables = pages
        block_size, attended = key_pages.shape[1], []
        for place, table, own in zip(where, tables.split(1), query.split(1), strict=True):
            parts = []
            for (begin, chunk), chosen in zip(self._chunks(place, own), self._chosen[place.row], strict=True):
                step = torch.arange(chunk.shape[2], device=query.device)
                positions = torch.cat((chosen, begin + step))
                slots = (len(chosen) + 1 + step).expand(1, table.shape[1], -1)
                parts.append(
                    self._backend.prefill_attention(
                        chunk,
                        small_pages(key_pages, 1),
                        small_pages(value_pages, 1),
                        places(table, positions[None, None], block_size).int(),
                        Seen(slots),
                        scaling,
                    )
                )
            attended.append(torch.cat(parts, dim=2))
        return torch.cat(attended)

    def _chunks(self, place: Place, query: Tensor) -> list[tuple[int, Tensor]]:
        """Cut the new tokens' queries: (position of the first, [1, H_q, <= chunk, D])."""
        size = self._policy.chunk
        return [(place.begin + i * size, chunk) for i, chunk in enumerate(query.split(size, dim=2))]

    def _choose(self, layer: LayerCache, rows: Tensor, begin: int, chunk: Tensor, scaling: float) -> Tensor:
        """Return the positions before `begin` that a chunk reads, ascending."""
        count = self._policy.chunks_read * self._policy.chunk
        if begin <= count:
            return torch.arange(begin, device=rows.device)
        slots = torch.full((1, layer.lengths.shape[1], chunk.shape[2]), begin, device=rows.device)
        scores = torch.zeros(1, begin, device=rows.device)
        for block in attention_probabilities(chunk, layer, rows, slots, scaling):
            ages = torch.zeros(1, block.shape[3], dtype=torch.long, device=rows.device)
            scores += selection_scores(block.flatten(1, 2), selector_weights(ages, "uniform"))
        return top_positions(scores, torch.tensor([count], device=rows.device), count)[0]


@dataclass
class Load:
    """What a filter layer has sent for."""

    arrival: Any
    """A `PendingCopy`, [tokens, layers, H, 2, D]."""
    member: Tensor
    """Which sequence of the group each token belongs to, int64 [tokens]."""
    slot: Tensor
    """Where it shall lie among the sequence's slots, int64 [tokens]."""


class OffloadedOmniKV(OmniKVAttention):
    """Reads the same as `OmniKVAttention`, from a fast pool that holds only what is read.

    A filter layer sends for the chosen tokens of all layers up to the next one; the layer after it hides the copy.
    """

    def __init__(self, cache: Cache, backend: ModuleType, policy: OmniKV) -> None:
        super().__init__(cache, backend, policy)
        self._loads: dict[int, Load] = {}  # by the first layer that waits for it

    def choose(self, layer_index: int, group: Group, query: Tensor, scaling: float) -> Tensor:
        """See `OmniKVAttention.choose`; sends for what is new in the choice."""
        attended = super().choose(layer_index, group, query, scaling)
        assert self._choice is not None
        positions = self._choice.positions.cpu()
        is_new = [True] * len(positions) if self._choice.is_new is None else self._choice.is_new.tolist()
        members = [i for i, new in enumerate(is_new) if new]
        self._loads.pop(self._runs[layer_index][0], None)  # an interrupted pass may have left one
        if members:
            counts = [self.policy.num_chosen(group.places[i].prompt_end) for i in members]
            chosen = [positions[i, :count] for i, count in zip(members, counts, strict=True)]
            self._loads[self._runs[layer_index][0]] = Load(
                self.cache.slow.fetch(layer_index, [group.places[i].row for i in members], chosen),
                torch.tensor(members).repeat_interleave(torch.tensor(counts)).to(query.device),
                torch.cat([torch.arange(count) for count in counts]).to(query.device),
            )
        return attended

    def read_choice(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `OmniKVAttention.read_choice`: everything in pages."""
        seen = self.append(layer_index, tokens)
        if (load := self._loads.pop(layer_index, None)) is not None:
            self._unpack(layer_index, group, load)
        return self.attend_to_all(layer_index, group, query, seen, scaling)

    def _unpack(self, first_layer: int, group: Group, load: Load) -> None:
        """Write what has arrived into the pages of all layers of a run."""
        packed, cache = load.arrival.on_device(), self.cache
        tables = cache.block_tables[first_layer : first_layer + packed.shape[1], group.rows]
        slots = load.slot.repeat(len(tables))[:, None, None]
        place = places(tables[:, load.member].flatten(0, 1), slots, cache.block_size)
        place = place.view(len(tables), len(load.slot), -1).transpose(0, 1)  # [tokens, layers, H]
        for i, name in enumerate(("key_pages", "value_pages")):
            cache.fields[name].flatten(0, 1)[place] = packed[..., i, :]

    def read_prompt(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `OmniKVAttention.read_prompt`: keys and values of one sequence and layer at a time pass through."""
        attended = []
        for i, place in enumerate(group.places):
            key, value = self._offload(layer_index, group.rows[i : i + 1], place, tokens.key[i], tokens.value[i])
            pages, own = self._as_pages(key, value), query[i : i + 1]
            if self._prefill is not None:
                attended.append(self._prefill.attend(pages, [place], own, scaling))
                continue
            slots = torch.arange(place.begin + 1, place.begin + 1 + own.shape[2], device=own.device)
            seen = Seen(slots.expand(1, len(key), -1))
            attended.append(self.backend.prefill_attention(own, *pages, seen, scaling))
        return torch.cat(attended)

    def _offload(
        self, layer_index: int, rows: Tensor, place: Place, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send new tokens [H, n, D] to the slow pool, behind generated ones that lie in pages; return all there are."""
        slow, layer, row = self.cache.slow, self.cache.layer(layer_index), place.row
        offloaded, room = int(slow.tokens[layer_index, row]), int(slow.room[layer_index, row])
        generated = torch.arange(room, room + place.begin - offloaded, device=rows.device)
        table = layer.block_tables[rows]
        new_key = torch.cat((gather_slots(layer.key_pages, table, generated[None, None])[0], key), dim=1)
        new_value = torch.cat((gather_slots(layer.value_pages, table, generated[None, None])[0], value), dim=1)
        old_key, old_value = slow.read(layer_index, row, offloaded)
        slow.write(layer_index, row, offloaded, new_key, new_value)
        held = room + len(generated)
        # one more slot for each new token at most: the pass has made sure of those
        wanted = min(held + key.shape[1], self.policy.num_chosen(place.prompt_end))
        self._resize(layer_index, rows, held, wanted)
        slow.room[layer_index, row] = wanted
        return torch.cat((old_key, new_key), dim=1), torch.cat((old_value, new_value), dim=1)

    def _resize(self, layer_index: int, rows: Tensor, held: int, wanted: int) -> None:
        """Give a layer of one sequence so many slots; what they hold does not matter."""
        layer, layout = self.cache.layer(layer_index), self.cache.layout
        if wanted > held:
            shape = (1, layout.num_kv_heads, wanted - held, layout.head_dim)
            nothing = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
            positions = torch.arange(held, wanted, device=layout.device)[None]
            self.append(layer_index, NewTokens(rows, positions, nothing, nothing))
        elif wanted < held:
            capacity = layer.block_tables.shape[-1] * layer.block_size
            keep = torch.arange(capacity, device=layout.device) < wanted
            self.backend.compact(layer, rows, keep.expand(1, layout.num_kv_heads, -1))

    def _as_pages(self, key: Tensor, value: Tensor) -> Pages:
        """Lay keys and values [H, n, D] out as pages of one sequence."""
        heads, size = key.shape[0], self.cache.block_size
        per_head = -(-key.shape[1] // size)
        beyond = per_head * size - key.shape[1]
        table = torch.arange(heads * per_head, dtype=torch.int32, device=key.device).view(1, heads, per_head)
        key_pages, value_pages = (
            pad(each, (0, 0, 0, beyond)).reshape(-1, size, each.shape[-1]) for each in (key, value)
        )
        return key_pages, value_pages, table
