"""OmniKV (ICLR 2025, https://openreview.net/forum?id=ulCAPXYXfa): a few layers choose the tokens that the others read.

First the options and their arithmetic, then the attention, with `SparsePrefill` within prompts. `placement.py` knows
where the entries lie.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import StrictFloat
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import Count, NonNegative, checked_dataclass
from dmc.kernels.base import LayerCache, NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch, on_device
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import places, small_pages
from dmc.kernels.probabilities import attention_probabilities
from dmc.policies.layer_attention import Cache, CacheAttention, Rotary
from dmc.policies.placement import Choice, DevicePlacement, HostPlacement, PromptPart
from dmc.policies.reading import ReadingPolicy, backend_for_pages, top_positions

Selector = Literal["last", "uniform", "exponential"]
Prefill = Literal["full", "sparse"]


@checked_dataclass(frozen=True, kw_only=True)
class OmniKV(ReadingPolicy):
    """Let filter layers choose, at each generated token, the prompt tokens that the layers after them read.

    The layers before the first filter layer, the filter layers and the one after each read everything. Any other layer
    reads the prompt tokens that the nearest filter layer before it has chosen, the same in all heads, and all generated
    ones. A filter layer chooses as many prompt tokens as the budget, by the attention A_h,t[i] of its last queries t:

        score_i = sum over t of w_t max over query heads h of A_h,t[i]

    A is a softmax over the prompt alone, and `selector` sets the weights w.

    Differs from the authors' code: attention is normalized for the "last" selector too. Each generated token has its
    own choice. Queries of a window keep their positions, and prompt tokens in the window are candidates.
    """

    budget: Budget | None = None  # type: ignore[assignment]
    """Number of prompt tokens that are chosen; a ratio is of the prompt."""
    memory: Annotated[StrictFloat, pydantic.Field(gt=0, le=1)] | None = None
    """In place of a budget: the share of a full cache in fast memory, full layers included (Mem%)."""
    filter_layers: tuple[NonNegative, ...] | None = None
    """Indices of the filter layers, ascending, from 0; None: `default_filter_layers`."""
    selector: Selector = "last"
    """Queries that choose: the newest, or the last `window` with weights that are equal or halve with distance."""
    window: Count = 16
    """Number of queries of the uniform and the exponential selector."""
    offload: bool = False
    """Whether prompt entries of sparse layers are offloaded to the host's memory."""
    prefill: Prefill = "full"
    """sparse: prompts are read in chunks, and layers choose for a chunk as they do for a generated token."""
    chunk: Count = 1024
    """Tokens of a chunk of a sparse prefill."""
    chunks_read: Count = 2
    """Number of earlier tokens chosen for a chunk, in chunks (r in the paper), by the uniform selector."""

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.memory is None):
            raise ValueError(f"budget={self.budget}, memory={self.memory}: give exactly one")
        layers = self.filter_layers
        if layers == () or (layers and any(after - before < 2 for before, after in itertools.pairwise(layers))):
            raise ValueError(
                f"filter_layers={layers}: expected ascending layers, no two adjacent, such as (2, 8, 18); the layer "
                "after each reads everything"
            )

    @property
    @override
    def prompt_chunk(self) -> int | None:
        return self.chunk if self.prefill == "sparse" else None

    @property
    @override
    def can_fork(self) -> bool:
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
            budget = Budget(ratio=max(1.0, 1 / prompt_share(self.memory, num_layers, filters)))
        fitted = copy.copy(self)  # no new construction: default filter layers of a shallow model are adjacent
        for name, value in (("filter_layers", filters), ("budget", budget), ("memory", None)):
            object.__setattr__(fitted, name, value)
        return fitted

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """The choosing queries, if there are several."""
        if self.num_queries == 1:
            return ()
        shape = (self.num_queries, layout.num_query_heads, layout.head_dim)
        num_filters = len(self.sparse_layers(layout.num_layers))
        return (Field("queries", layout.dtype, "row", shape, num_layers=num_filters),)

    @override
    def offloaded(self, num_layers: int) -> dict[int, list[int]]:
        return self.sparse_layers(num_layers) if self.offload else {}

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> OmniKVAttention:
        return OmniKVAttention(cache, backend, self)

    def num_chosen(self, prompt_length: int) -> int:
        """Number of prompt tokens that a sparse layer reads."""
        assert self.budget is not None
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


class OmniKVAttention(CacheAttention):
    """Attends to everything in full layers, and to a filter layer's choice in sparse layers."""

    def __init__(self, cache: Cache, backend: ModuleType, policy: OmniKV) -> None:
        super().__init__(cache, backend)
        self.policy = policy
        self._runs = policy.sparse_layers(cache.layout.num_layers)
        self._filter = {layer: i for i, layer in enumerate(self._runs)}
        self._prefill = SparsePrefill(self) if policy.prefill == "sparse" else None
        self._placement = DevicePlacement(self) if cache.slow is None else HostPlacement(self)
        self._choice: Choice | None = None

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:

        def attend_part(part: ForwardBatch, where: Tensor | slice) -> Tensor:
            if self.policy.filter_of(layer_index) is None:
                read = self._read_all
            else:
                read = self._read_prompt if part.is_prompt else self._read_choice
            return read(layer_index, part, query[where], tokens.part(where), scaling)

        return self.by_phase(batch, query, attend_part)

    def _read_all(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """Run a full layer, [T, H_q, D]; a filter layer also chooses."""
        seen = self.append(layer_index, batch, tokens)
        if layer_index in self._runs:
            self._remember(layer_index, batch, query)
            if not batch.is_prompt:
                return self._choose(layer_index, batch, query, scaling)
            if self._prefill is not None:
                self._prefill.choose(self.cache.layer(layer_index), batch, query, scaling)
        return self.attend_to_all(layer_index, batch, query, seen, scaling)

    def _read_prompt(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """Run a sparse layer on prompt tokens, [T, H_q, D]."""
        num_chosen = [self.policy.num_chosen(end) for end in batch.prompt_ends]
        parts = self._placement.append_prompt(layer_index, batch, tokens, num_chosen)
        if self._prefill is not None:
            return self._prefill.attend(parts, query, scaling, self.cache.layer(layer_index).sinks)
        attend = functools.partial(self.backend.prefill_attention, sinks=self.cache.layer(layer_index).sinks)
        return torch.cat([attend(query[part.span], *part.pages, part.batch, part.seen, scaling) for part in parts])

    def _read_choice(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float
    ) -> Tensor:
        """Run a sparse layer on generated tokens, [S, H_q, D]."""
        assert self._choice is not None
        return self._placement.read(layer_index, batch, query, tokens, self._choice, scaling)

    def _choose(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float) -> Tensor:
        """Attend from generated tokens in a filter layer, and choose for the layers after it."""
        prompt = batch.ends_of_prompts
        attended, scores = self._look(layer_index, batch, query, prompt, scaling)
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= prompt[:, None], -torch.inf)
        counts = [self.policy.num_chosen(end) for end in batch.prompt_ends]
        num_chosen = on_device(torch.tensor(counts), prompt.device)
        choice = Choice(top_positions(scores, num_chosen, max(counts)), num_chosen, counts)
        self._placement.prepare(layer_index, self._runs[layer_index], batch, choice)
        self._choice = choice
        return attended

    def _look(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, prompt: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Attend to everything, [S, H_q, D], and score the tokens of the prompts, [S, N]."""
        layer, rows = self.cache.layer(layer_index), batch.row_index
        longest, most_seen = max(batch.prompt_ends), max(batch.ends)
        is_last = self.policy.selector == "last"
        wanted: dict[str, Any] = {"return_scores": is_last, "num_scores": self.whole_pages(most_seen)}
        answer = self.attend_once(layer_index, batch, query, scaling, **wanted)
        if is_last:  # softmax over everything, normalized again, is softmax over the prompt
            attended, attention = answer[0], answer[1][..., :longest]
            is_prompt = torch.arange(longest, device=rows.device) < prompt[:, None]
            attention = attention * is_prompt[:, None]
            total = attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
            return attended, (attention / total).amax(1)
        queries, positions = self._queries(layer_index, batch)
        slots = (positions + 1).clamp_min(1).minimum(prompt[:, None])[:, None].expand(-1, layer.lengths.shape[1], -1)
        weights = selector_weights(positions[:, -1:] - positions, self.policy.selector) * (positions >= 0)
        scores, begin = torch.zeros(len(rows), longest, device=rows.device), 0
        for block in attention_probabilities(queries, layer, rows, slots, scaling, longest):
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


class SparsePrefill:
    """Reads prompts in chunks (OmniKV-prefill); exact while a chunk may read all tokens before it."""

    def __init__(self, attention: OmniKVAttention) -> None:
        self._policy = attention.policy
        self._backend = backend_for_pages(attention.backend, attention.cache.layout, 1)
        self._chosen: list[list[Tensor]] = []  # of the latest filter layer: by sequence, each chunk's positions

    def choose(self, layer: LayerCache, batch: ForwardBatch, query: Tensor, scaling: float) -> None:
        """Choose for every chunk, by all of its queries with equal weights; the layer holds the new tokens already."""
        self._chosen = []
        for i, span in enumerate(batch.spans):
            chunks, rows = self._chunks(batch.begins[i], query[span]), batch.row_index[i : i + 1]
            self._chosen.append([self._choose(layer, rows, begin, chunk, scaling) for begin, chunk in chunks])

    def attend(self, parts: list[PromptPart], query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """Attend in a sparse layer from each chunk to its chosen tokens and to its own, [T, H_q, D]."""
        attended, chosen = [], iter(self._chosen)
        for part in parts:
            key_pages, value_pages, tables = part.pages
            for row, begin, span in zip(part.batch.rows, part.batch.begins, part.batch.spans, strict=True):
                chunks = self._chunks(begin, query[part.span][span])
                for (first, chunk), positions in zip(chunks, next(chosen), strict=True):
                    step = torch.arange(len(chunk), device=query.device)
                    read = torch.cat((positions, first + step))[None, None]
                    seen = (len(positions) + 1 + step).int()[:, None].expand(-1, tables.shape[1])
                    attended.append(
                        self._backend.prefill_attention(
                            chunk,
                            small_pages(key_pages, 1),
                            small_pages(value_pages, 1),
                            places(tables[row : row + 1], read, key_pages.shape[1]).int(),
                            ForwardBatch([0], [first], [len(chunk)], query.device),
                            VisibleKeys(seen),
                            scaling,
                            sinks=sinks,
                        )
                    )
        return torch.cat(attended)

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
        for block in attention_probabilities(chunk.transpose(0, 1)[None], layer, rows, slots, scaling, begin):
            distances = torch.zeros(1, block.shape[3], dtype=torch.long, device=rows.device)
            scores += selection_scores(block.flatten(1, 2), selector_weights(distances, "uniform"))
        return top_positions(scores, on_device(torch.tensor([count]), rows.device), count)[0]
