"""OmniKV (ICLR 2025, https://openreview.net/forum?id=ulCAPXYXfa): a few layers choose the tokens that the others read.

First the options and their arithmetic, then the attention: `OmniKVAttention` over one pool, `SparsePrefill` within
prompts, and `OffloadedOmniKV` over two pools.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmc.budget import Budget
from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import gather_pages, gather_slots, places, small_pages
from dmc.kernels.probabilities import attention_probabilities
from dmc.policies.layer_attention import Cache, CacheAttention, RotaryTables
from dmc.policies.reading import ReadingPolicy, backend_for_pages, top_positions, with_tail

Selector = Literal["last", "uniform", "exponential"]
Prefill = Literal["full", "sparse"]


@dataclass(frozen=True, kw_only=True)
class OmniKV(ReadingPolicy):
    """Let filter layers choose, at each generated token, the prompt tokens that the layers after them read.

    The layers before the first filter layer, the filter layers and the one after each read everything. Any other layer
    reads the prompt tokens that the nearest filter layer before it has chosen, the same in all heads, and all generated
    ones. A filter layer chooses as many prompt tokens as the budget by the attention of its last queries, softmax over
    the prompt alone, maximum over all query heads, summed over the queries.

    Differs from the authors' code: attention is normalized for the "last" selector too, unless `raw_scores`; queries of
    a window keep their own positions, and prompt tokens in the window are candidates like others.

    Raises:
        ValueError: an option is out of range, or both or neither of `budget` and `memory` are given.
    """

    budget: Budget = None  # type: ignore[assignment]
    """Number of prompt tokens that are chosen; a ratio is of the prompt."""
    memory: float | None = None
    """In place of a budget: the share of a full cache in fast memory, full layers included (Mem%)."""
    filter_layers: tuple[int, ...] | None = None
    """Indices of the filter layers, ascending, from 0; None: `default_filter_layers`."""
    selector: Selector = "last"
    """Queries that choose: the newest, or the last `window` with weights that are equal or halve with distance."""
    window: int = 16
    """Number of queries of the uniform and the exponential selector."""
    raw_scores: bool = False
    """Whether the last query's attention is left unnormalized, as in the authors' code."""
    lazy_reload: float | None = None
    """Keep the old choice if more than this share of the new one is in it (0.4 in the authors' code); None: never."""
    offload: bool = False
    """Whether prompt entries of sparse layers are offloaded to the host's memory."""
    prefill: Prefill = "full"
    """sparse: prompts are read in chunks, and layers choose for a chunk as they do for a generated token."""
    chunk: int = 1024
    """Tokens of a chunk of a sparse prefill."""
    chunks_read: int = 2
    """Number of earlier tokens chosen for a chunk, in chunks (r in the paper), by the uniform selector."""

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.memory is None):
            raise ValueError(f"budget={self.budget}, memory={self.memory}: give exactly one")
        if self.memory is not None and not 0 < self.memory <= 1:
            raise ValueError(f"memory={self.memory}: expected a share of the cache in (0, 1], such as 0.3")
        if self.filter_layers is not None:
            layers = tuple(self.filter_layers)
            object.__setattr__(self, "filter_layers", layers)
            if not layers or layers[0] < 0 or any(after - before < 2 for before, after in itertools.pairwise(layers)):
                raise ValueError(
                    f"filter_layers={layers}: expected ascending layers, from 0, at least one and no two adjacent (the "
                    "layer after a filter layer reads everything), such as (2, 8, 18)"
                )
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
        """Number of queries that choose."""
        return 1 if self.selector == "last" else self.window

    def fitted(self, num_layers: int, block_size: int) -> OmniKV:
        """See `CachePolicy.fitted`: sets the filter layers and the budget."""
        filters = default_filter_layers(num_layers) if self.filter_layers is None else self.filter_layers
        if filters[-1] >= num_layers:
            raise ValueError(f"filter_layers={filters}: the model has layers 0 to {num_layers - 1}")
        budget = self.budget
        if self.memory is not None:
            share = prompt_share(self.memory, num_layers, filters)
            budget = Budget(ratio=max(1.0, 1 / share))
        fitted = copy.copy(self)  # no new construction: default filter layers of a shallow model are adjacent
        for name, value in (("filter_layers", filters), ("budget", budget), ("memory", None)):
            object.__setattr__(fitted, name, value)
        return fitted

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """The choosing queries, if there are several, and the last choice, if it may be kept."""
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
        """Number of prompt tokens that a sparse layer reads."""
        return min(self.budget.entries(prompt_length), prompt_length)

    def filter_of(self, layer_index: int) -> int | None:
        """Return the filter layer, of a fitted policy, that chooses for a layer; None: the layer reads everything."""
        assert self.filter_layers is not None
        if reads_all(layer_index, self.filter_layers):
            return None
        return max(index for index in self.filter_layers if index < layer_index)

    def sparse_layers(self, num_layers: int) -> dict[int, list[int]]:
        """List the layers that each filter layer of a fitted policy chooses for; filter layers of none are left out."""
        runs: dict[int, list[int]] = {}
        for layer_index in range(num_layers):
            if (chooser := self.filter_of(layer_index)) is not None:
                runs.setdefault(chooser, []).append(layer_index)
        return runs


def default_filter_layers(num_layers: int) -> tuple[int, ...]:
    """Scale layers 2, 8 and 18 of 32 (Llama-3-8B in the paper) to any depth, rounded down."""
    return tuple(sorted({num_layers * layer // 32 for layer in (2, 8, 18)}))


def reads_all(layer_index: int, filter_layers: Sequence[int]) -> bool:
    """Whether a layer reads everything: it is before all filter layers, or is one, or comes right after one."""
    return layer_index < filter_layers[0] or layer_index in filter_layers or layer_index - 1 in filter_layers


def prompt_share(memory: float, num_layers: int, filter_layers: Sequence[int]) -> float:
    """Share of a prompt's tokens to choose so that a share `memory` of its entries is in fast memory (Mem%).

    The layers that read everything hold a share of (2 m + L_0) / L for m filter layers, none of them the last layer; 1
    where that is every layer.

    Raises:
        ValueError: the layers that read everything already take as much.
    """
    full = sum(reads_all(index, filter_layers) for index in range(num_layers)) / num_layers
    if full == 1:
        return 1.0
    if memory <= full:
        raise ValueError(
            f"memory={memory}: the layers that read everything hold {full:.4g} of the cache with "
            f"filter_layers={tuple(filter_layers)} of {num_layers} layers; raise memory, or choose fewer filter layers"
        )
    return (memory - full) / (1 - full)


def selector_weights(distances: Tensor, selector: Selector) -> Tensor:
    """Weights of queries by distance from the newest: 1 at 0 alone (last), 1 (uniform), or 2^-(1 + distance).

    Args:
        distances: queries back from the newest, int [...].
        selector: name of the rule.
    Returns:
        Float32, shape of `distances`.
    """
    if selector == "last":
        return (distances == 0).float()
    if selector == "uniform":
        return (distances >= 0).float()
    return 0.5 ** (distances + 1).float()


def selection_scores(attention: Tensor, weights: Tensor) -> Tensor:
    """Take the maximum over query heads, and sum over queries with weights.

    Args:
        attention: [S, H_q, queries, N].
        weights: [S, queries].
    Returns:
        [S, N].
    """
    return (attention.amax(1) * weights[..., None]).sum(1)


@dataclass
class Choice:
    """Prompt tokens that a filter layer has chosen for the sequences that decode in this pass."""

    positions: Tensor
    """Positions of the prompt tokens, ascending, int64 [S, k]; arbitrary beyond the count."""
    counts: Tensor
    """Number of chosen tokens, int64 [S]."""
    is_new: Tensor | None = None
    """Whether the choice differs from the last one, bool [S]; None: unknown."""
    reads: tuple[Tensor, Tensor] | None = None
    """The chosen and all generated tokens, int64 [S, K], and their number, int32 [S, 1]; set by the first reader."""


class OmniKVAttention(CacheAttention):
    """Attends to everything in full layers, and to a filter layer's choice in sparse layers."""

    def __init__(self, cache: Cache, backend: ModuleType, policy: OmniKV) -> None:
        super().__init__(cache, backend)
        self.policy = policy
        self._runs = policy.sparse_layers(cache.layout.num_layers)
        self._filter = {layer: i for i, layer in enumerate(self._runs)}
        self._entry_backend = backend_for_pages(backend, cache.layout, 1)
        self._prefill = SparsePrefill(policy, self._entry_backend) if policy.prefill == "sparse" else None
        self._choice: Choice | None = None

    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `CacheAttention.attend`."""

        def attend_part(part: ForwardBatch, where: Tensor | slice) -> Tensor:
            own = NewTokens(tokens.key[where], tokens.value[where])
            if self.policy.filter_of(layer_index) is None:
                return self.read_all(layer_index, part, query[where], own, scaling)
            read = self.read_prompt if part.is_prompt else self.read_choice
            return read(layer_index, part, query[where], own, scaling)

        return self.by_phase(batch, query, attend_part)

    def read_all(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """Run a full layer, [T, H_q, D]; a filter layer also chooses."""
        seen = self.append(layer_index, batch, tokens)
        if layer_index in self._runs:
            self._remember(layer_index, batch, query)
            if not batch.is_prompt:
                return self.choose(layer_index, batch, query, scaling)
            if "chosen" in self.cache.fields:
                self.cache.fields["chosen"][self._filter[layer_index], batch.row_index] = -1
            if self._prefill is not None:
                self._prefill.choose(self.cache.layer(layer_index), batch, query, scaling)
        return self.attend_to_all(layer_index, batch, query, seen, scaling)

    def read_prompt(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """Run a sparse layer on prompt tokens, [T, H_q, D]."""
        seen = self.append(layer_index, batch, tokens)
        if self._prefill is None:
            return self.attend_to_all(layer_index, batch, query, seen, scaling)
        layer = self.cache.layer(layer_index)
        pages = layer.key_pages, layer.value_pages, layer.block_tables[batch.row_index]
        return self._prefill.attend(pages, batch, query, scaling)

    def read_choice(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """Run a sparse layer on generated tokens, [S, H_q, D]."""
        self.append(layer_index, batch, tokens)
        assert self._choice is not None
        if self._choice.reads is None:
            self._choice.reads = self._with_generated(batch, self._choice)
        layer, (positions, lengths) = self.cache.layer(layer_index), self._choice.reads
        attended: Tensor = self._entry_backend.paged_attention(
            query,
            small_pages(layer.key_pages, 1),
            small_pages(layer.value_pages, 1),
            places(layer.block_tables[batch.row_index], positions[:, None], layer.block_size).int(),
            lengths.expand(-1, layer.lengths.shape[1]),
            scaling,
        )
        return attended

    def _with_generated(self, batch: ForwardBatch, choice: Choice) -> tuple[Tensor, Tensor]:
        """Return the tokens that layers read under a choice, see `Choice.reads`."""
        prompt, end = batch.ends_of_prompts, batch.tokens_seen
        most_generated = max(end - prompt for end, prompt in zip(batch.ends, batch.prompt_ends, strict=True))
        width = choice.positions.shape[1] + most_generated
        positions = with_tail(choice.positions, choice.counts, prompt, end, width)
        return positions, (choice.counts + end - prompt).int()[:, None]

    def choose(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float) -> Tensor:
        """Attend from generated tokens in a filter layer, and choose for the layers after it."""
        prompt = batch.ends_of_prompts
        attended, scores = self._look(layer_index, batch, query, prompt, scaling)
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= prompt[:, None], -torch.inf)
        counts = [self.policy.num_chosen(end) for end in batch.prompt_ends]
        num_chosen = torch.tensor(counts, device=prompt.device)
        choice = Choice(top_positions(scores, num_chosen, max(counts)), num_chosen)
        if self.policy.lazy_reload is not None:
            self._prefer_last_choice(layer_index, batch, choice, self.policy.lazy_reload)
        self._choice = choice
        return attended

    def _look(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, prompt: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Attend to everything, [S, H_q, D], and score the tokens of the prompts, [S, N]."""
        layer, rows = self.cache.layer(layer_index), batch.row_index
        longest, most_seen = max(batch.prompt_ends), max(batch.ends)
        is_last = self.policy.selector == "last" and not self.policy.raw_scores
        wanted: dict[str, Any] = {"return_scores": is_last, "num_scores": self.whole_pages(most_seen)}
        answer = self.attend_once(layer_index, batch, query, scaling, **wanted)
        if is_last:  # softmax over everything, normalized again, is softmax over the prompt
            attended, attention = answer[0], answer[1][..., :longest]
            is_prompt = torch.arange(longest, device=rows.device) < prompt[:, None]
            attention = attention * is_prompt[:, None]
            total = attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
            return attended, (attention / total).amax(1)
        if self.policy.raw_scores:
            key = gather_pages(layer.key_pages, layer.block_tables[rows], longest).float()
            scores = (
                query.float().reshape(len(rows), key.shape[1], -1, query.shape[-1]) @ key.transpose(-1, -2) * scaling
            )
            return answer, scores.amax((1, 2))
        queries, positions = self._queries(layer_index, batch)
        slots = (positions + 1).clamp_min(1).minimum(prompt[:, None])[:, None].expand(-1, layer.lengths.shape[1], -1)
        weights = selector_weights(positions[:, -1:] - positions, self.policy.selector) * (positions >= 0)
        scores, begin = torch.zeros(len(rows), longest, device=rows.device), 0
        for block in attention_probabilities(queries, layer, rows, slots, scaling):
            end = begin + block.shape[3]
            scores[:, : block.shape[-1]] += selection_scores(block.flatten(1, 2), weights[:, begin:end])
            begin = end
        return answer, scores

    def _remember(self, layer_index: int, batch: ForwardBatch, query: Tensor) -> None:
        """Keep the last queries of a filter layer, if several choose."""
        window = self.policy.num_queries
        if window > 1:  # the query at position p is stored at p % W
            for row, span in zip(batch.rows, batch.spans, strict=True):
                last = slice(max(span.start, span.stop - window), span.stop)
                place = row, batch.positions[last] % window
                self.cache.fields["queries"][self._filter[layer_index]][place] = query[last]

    def _queries(self, layer_index: int, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return a filter layer's last queries, oldest first, [S, H_q, W, D], and their positions, < 0 for none."""
        window = self.policy.num_queries
        positions = batch.tokens_seen[:, None] + torch.arange(-window, 0, device=batch.row_index.device)
        queries = self.cache.fields["queries"][self._filter[layer_index]]
        return queries[batch.row_index[:, None], positions % window].transpose(1, 2), positions

    def _prefer_last_choice(self, layer_index: int, batch: ForwardBatch, choice: Choice, threshold: float) -> None:
        """Keep the last choice of sequences where it contains more than a share of the new one."""
        width = choice.positions.shape[1]
        exists = torch.arange(width, device=batch.row_index.device) < choice.counts[:, None]
        every = self.cache.fields.widen("chosen", width)[self._filter[layer_index]]
        last = every[batch.row_index, :width].long()
        longest = max(batch.prompt_ends)
        was_chosen = torch.zeros(len(last), longest + 1, dtype=torch.bool, device=last.device)
        was_chosen.scatter_(1, last.where(last >= 0, longest), True)
        common = (was_chosen.gather(1, choice.positions) & exists).sum(-1)
        choice.is_new = common <= threshold * choice.counts
        choice.positions = choice.positions.where(choice.is_new[:, None], last.clamp_min(0))
        every[batch.row_index, :width] = choice.positions.where(exists, -1).to(every.dtype)


Pages = tuple[Tensor, Tensor, Tensor]
"""Keys and values, [N, block, D] each, and the tables of S sequences, int32 [S, H, M]."""


class SparsePrefill:
    """Reads prompts in chunks (OmniKV-prefill); exact while a chunk may read all tokens before it.

    Args:
        policy: gives the length of chunks and how much they read.
        backend: kernel module that serves pages of one entry.
    """

    def __init__(self, policy: OmniKV, backend: ModuleType) -> None:
        self._policy, self._backend = policy, backend
        self._chosen: dict[int, list[Tensor]] = {}  # of the latest filter layer: by row, each chunk's positions

    def choose(self, layer: LayerCache, batch: ForwardBatch, query: Tensor, scaling: float) -> None:
        """Choose for every chunk, by all of its queries with equal weights; the layer holds the new tokens already."""
        for i, (row, span) in enumerate(zip(batch.rows, batch.spans, strict=True)):
            chunks, rows = self._chunks(batch.begins[i], query[span]), batch.row_index[i : i + 1]
            self._chosen[row] = [self._choose(layer, rows, begin, chunk, scaling) for begin, chunk in chunks]

    def attend(self, pages: Pages, batch: ForwardBatch, query: Tensor, scaling: float) -> Tensor:
        """Attend in a sparse layer from each chunk to its chosen tokens and to its own, [T, H_q, D]."""
        key_pages, value_pages, tables = pages
        block_size, parts = key_pages.shape[1], []
        for i, (row, span) in enumerate(zip(batch.rows, batch.spans, strict=True)):
            table = tables[i : i + 1]
            chunks = self._chunks(batch.begins[i], query[span])
            for (begin, chunk), chosen in zip(chunks, self._chosen[row], strict=True):
                step = torch.arange(len(chunk), device=query.device)
                positions = torch.cat((chosen, begin + step))
                slots = (len(chosen) + 1 + step).int()[:, None].expand(-1, table.shape[1])
                parts.append(
                    self._backend.prefill_attention(
                        chunk,
                        small_pages(key_pages, 1),
                        small_pages(value_pages, 1),
                        places(table, positions[None, None], block_size).int(),
                        ForwardBatch([0], [begin], [len(chunk)], query.device),
                        VisibleKeys(slots),
                        scaling,
                    )
                )
        return torch.cat(parts)

    def _chunks(self, begin: int, query: Tensor) -> list[tuple[int, Tensor]]:
        """Cut the queries of one sequence into chunks: (position of the first, [<= chunk, H_q, D])."""
        size = self._policy.chunk
        return [(begin + i * size, chunk) for i, chunk in enumerate(query.split(size))]

    def _choose(self, layer: LayerCache, rows: Tensor, begin: int, chunk: Tensor, scaling: float) -> Tensor:
        """Return the positions before `begin` that a chunk reads, ascending."""
        count = self._policy.chunks_read * self._policy.chunk
        if begin <= count:
            return torch.arange(begin, device=rows.device)
        slots = torch.full((1, layer.lengths.shape[1], len(chunk)), begin, device=rows.device)
        scores = torch.zeros(1, begin, device=rows.device)
        for block in attention_probabilities(chunk.transpose(0, 1)[None], layer, rows, slots, scaling):
            distances = torch.zeros(1, block.shape[3], dtype=torch.long, device=rows.device)
            scores += selection_scores(block.flatten(1, 2), selector_weights(distances, "uniform"))
        return top_positions(scores, torch.tensor([count], device=rows.device), count)[0]


@dataclass
class Load:
    """A copy of chosen tokens from the host that a filter layer has started."""

    arrival: Any
    """The `PendingCopy`, [tokens, layers, H, 2, D]."""
    member: Tensor
    """Index in the batch of each token's sequence, int64 [tokens]."""
    slot: Tensor
    """Slot of each token in its sequence, int64 [tokens]."""


class OffloadedOmniKV(OmniKVAttention):
    """Reads the same tokens as `OmniKVAttention`, from a fast pool that holds only these.

    A filter layer starts copying the chosen tokens of all layers up to the next one; the layer after it hides the copy.
    """

    def __init__(self, cache: Cache, backend: ModuleType, policy: OmniKV) -> None:
        super().__init__(cache, backend, policy)
        self._loads: dict[int, Load] = {}  # by the first layer that needs it

    def choose(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float) -> Tensor:
        """See `OmniKVAttention.choose`; starts copying the newly chosen tokens."""
        attended = super().choose(layer_index, batch, query, scaling)
        assert self._choice is not None
        positions = self._choice.positions.cpu()
        is_new = [True] * len(positions) if self._choice.is_new is None else self._choice.is_new.tolist()
        members = [i for i, new in enumerate(is_new) if new]
        self._loads.pop(self._runs[layer_index][0], None)  # an interrupted pass may have left one
        if members:
            counts = [self.policy.num_chosen(batch.prompt_ends[i]) for i in members]
            chosen = [positions[i, :count] for i, count in zip(members, counts, strict=True)]
            self._loads[self._runs[layer_index][0]] = Load(
                self.cache.slow.fetch(layer_index, [batch.rows[i] for i in members], chosen),
                torch.tensor(members).repeat_interleave(torch.tensor(counts)).to(query.device),
                torch.cat([torch.arange(count) for count in counts]).to(query.device),
            )
        return attended

    def read_choice(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """See `OmniKVAttention.read_choice`: reads all tokens in pages."""
        seen = self.append(layer_index, batch, tokens)
        if (load := self._loads.pop(layer_index, None)) is not None:
            self._unpack(layer_index, batch, load)
        return self.attend_to_all(layer_index, batch, query, seen, scaling)

    def _unpack(self, first_layer: int, batch: ForwardBatch, load: Load) -> None:
        """Write the copied tokens into the pages of all layers of a run."""
        packed, cache = load.arrival.on_device(), self.cache
        tables = cache.block_tables[first_layer : first_layer + packed.shape[1], batch.row_index]
        slots = load.slot.repeat(len(tables))[:, None, None]
        place = places(tables[:, load.member].flatten(0, 1), slots, cache.block_size)
        place = place.view(len(tables), len(load.slot), -1).transpose(0, 1)  # [tokens, layers, H]
        for i, name in enumerate(("key_pages", "value_pages")):
            cache.fields[name].flatten(0, 1)[place] = packed[..., i, :]

    def read_prompt(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """See `OmniKVAttention.read_prompt`: loads keys and values of one sequence and layer at a time."""
        attended = []
        for i, span in enumerate(batch.spans):
            one = batch.part([i])[0]
            key, value = self._offload(
                layer_index, one, tokens.key[span].transpose(0, 1), tokens.value[span].transpose(0, 1)
            )
            pages, own = self._as_pages(key, value), query[span]
            if self._prefill is not None:
                attended.append(self._prefill.attend(pages, one, own, scaling))
                continue
            seen = VisibleKeys((one.positions + 1).int()[:, None].expand(-1, len(key)))
            alone = dataclasses.replace(one, rows=[0])
            attended.append(self.backend.prefill_attention(own, *pages, alone, seen, scaling))
        return torch.cat(attended)

    def _offload(self, layer_index: int, batch: ForwardBatch, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Copy one sequence's new tokens [H, n, D] to the slow pool, after its generated tokens in pages.

        Returns:
            All its keys and values.
        """
        (row,), (begin,), (prompt_end,), rows = batch.rows, batch.begins, batch.prompt_ends, batch.row_index
        slow, layer = self.cache.slow, self.cache.layer(layer_index)
        offloaded, room = int(slow.tokens[layer_index, row]), int(slow.room[layer_index, row])
        generated = torch.arange(room, room + begin - offloaded, device=rows.device)
        table = layer.block_tables[rows]
        new_key = torch.cat((gather_slots(layer.key_pages, table, generated[None, None])[0], key), dim=1)
        new_value = torch.cat((gather_slots(layer.value_pages, table, generated[None, None])[0], value), dim=1)
        old_key, old_value = slow.read(layer_index, row, offloaded)
        slow.write(layer_index, row, offloaded, new_key, new_value)
        held = room + len(generated)
        # at most one more slot for each new token: the pass has reserved them
        wanted = min(held + key.shape[1], self.policy.num_chosen(prompt_end))
        self._resize(layer_index, row, held, wanted)
        slow.room[layer_index, row] = wanted
        return torch.cat((old_key, new_key), dim=1), torch.cat((old_value, new_value), dim=1)

    def _resize(self, layer_index: int, row: int, held: int, wanted: int) -> None:
        """Set the number of slots of one sequence in a layer; their content is arbitrary."""
        layer, layout = self.cache.layer(layer_index), self.cache.layout
        if wanted > held:
            shape = (wanted - held, layout.num_kv_heads, layout.head_dim)
            nothing = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
            batch = ForwardBatch([row], [held], [wanted - held], layout.device)
            self.append(layer_index, batch, NewTokens(nothing, nothing))
        elif wanted < held:
            capacity = layer.block_tables.shape[-1] * layer.block_size
            keep = torch.arange(capacity, device=layout.device) < wanted
            rows = torch.tensor([row], device=layout.device)
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
