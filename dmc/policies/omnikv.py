"""OmniKV (ICLR 2025, https://openreview.net/forum?id=ulCAPXYXfa): a few layers choose what the others read."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dmc.budget import Budget
from dmc.policies.reading import ReadingPolicy

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
