"""Quest (arXiv:2406.10774): a query reads the pages whose bounds promise the highest scores."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import Count, NonNegative, checked_dataclass
from dmc.kernels.base import NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch, on_device
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import places, small_pages
from dmc.policies.layer_attention import Cache, CacheAttention, Rotary
from dmc.policies.reading import ReadingPolicy, backend_for_pages, top_positions


@checked_dataclass(frozen=True, kw_only=True)
class Quest(ReadingPolicy):
    """Bound the scores of every page of keys by their elementwise minimum and maximum; read the most promising pages.

    A page's bound is the sum over channels c of max(q_c min_c, q_c max_c). The newest token's page is always read.
    Nothing is evicted. Prompts are read in full.

    Differs from the authors' code, which chooses for every query head: here each KV head has one choice, by the sum
    over its group.
    """

    budget: Budget
    """Entries that are read, in whole pages, at least one; a ratio is of the prompt."""
    page_size: Count = 16
    """Entries of a page, a divisor of the engine's `block_size`."""
    dense_layers: NonNegative = 2
    """Number of first layers, which read everything."""

    @override
    def fitted(self, num_layers: int, block_size: int) -> Quest:
        if block_size % self.page_size:
            raise ValueError(
                f"page_size={self.page_size}: expected a divisor of block_size={block_size}; "
                "give the engine block_size=, or the policy another page_size="
            )
        return self

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """The elementwise minimum and maximum of every page's keys."""
        shape = (layout.head_dim,)
        return tuple(Field(name, layout.dtype, "block", shape, self.page_size) for name in ("lowest", "largest"))

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> QuestAttention:
        return QuestAttention(cache, backend, self)

    def num_pages(self, num_tokens: int, prompt_length: int) -> int:
        """Number of pages that the last of `num_tokens` tokens reads: all while the budget holds all tokens."""
        limit, pages = self.budget.entries(prompt_length), -(-num_tokens // self.page_size)
        return pages if num_tokens <= limit else min(pages, max(1, limit // self.page_size))


def upper_bounds(query: Tensor, lowest: Tensor, largest: Tensor) -> Tensor:
    """Bound q . k for all keys of a page: sum over channels of max(q * lowest, q * largest), and over query heads.

    Args:
        query: [..., group, D].
        lowest: elementwise minimum of each page's keys, [..., pages, D].
        largest: elementwise maximum, [..., pages, D].
    Returns:
        [..., pages].
    """
    upwards, downwards = query.clamp_min(0).sum(-2)[..., None], query.clamp_max(0).sum(-2)[..., None]
    return (largest @ upwards + lowest @ downwards)[..., 0]


class QuestAttention(CacheAttention):
    """Attends to everything in prompts and in the first layers, else to the most promising pages."""

    def __init__(self, cache: Cache, backend: ModuleType, policy: Quest) -> None:
        super().__init__(cache, backend)
        self.policy = policy
        self._pages_per_block = cache.block_size // policy.page_size
        self._page_backend = backend_for_pages(backend, cache.layout, policy.page_size)

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        seen = self.append(layer_index, batch, tokens)
        if layer_index < self.policy.dense_layers:
            return self.attend_to_all(layer_index, batch, query, seen, scaling)
        self._bound(layer_index, batch)

        def attend_part(part: ForwardBatch, where: Tensor | slice) -> Tensor:
            if not part.is_prompt and (reads := self._pages_read(part)) is not None:
                return self._attend_to_pages(layer_index, part, query[where], reads, scaling)
            return self.attend_to_all(
                layer_index, part, query[where], VisibleKeys(seen.slots[where], is_causal=seen.is_causal), scaling
            )

        return self.by_phase(batch, query, attend_part)

    def _pages_read(self, batch: ForwardBatch) -> list[int] | None:
        """Return the number of pages that each sequence reads; None: all of theirs."""
        reads = [self.policy.num_pages(*lengths) for lengths in zip(batch.ends, batch.prompt_ends, strict=True)]
        has = [begin // self.policy.page_size + 1 for begin in batch.begins]
        return None if reads == has else reads

    def _bounds(self) -> list[Tensor]:
        """Elementwise minimum and maximum of each page, [N * pages of a block, D]."""
        return [self.cache.fields[name].flatten(0, 1) for name in ("lowest", "largest")]

    def _bound(self, layer_index: int, batch: ForwardBatch) -> None:
        """Bound the pages that new tokens have entered."""
        layer, size, (lowest, largest) = self.cache.layer(layer_index), self.policy.page_size, self._bounds()
        end = batch.tokens_seen[:, None]
        first, last = batch.positions[batch.cu_seqlens[:-1], None] // size, (end - 1) // size
        most = (batch.most_new - 1) // size + 2
        page = torch.minimum(first + torch.arange(most, device=end.device), last)  # [S, pages], the last one repeated
        ids = places(layer.block_tables[batch.row_index], page[:, None], self._pages_per_block)
        keys = small_pages(layer.key_pages, size)[ids]  # [S, H, pages, size, D]
        slot = page[..., None] * size + torch.arange(size, device=end.device)
        missing = (slot >= end[..., None])[:, None, ..., None]
        lowest[ids] = keys.masked_fill(missing, torch.inf).amin(-2)
        largest[ids] = keys.masked_fill(missing, -torch.inf).amax(-2)

    def _attend_to_pages(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, reads: list[int], scaling: float
    ) -> Tensor:
        """Attend from one generated token of each sequence to its `reads` most promising pages."""
        layer, size, (lowest, largest) = self.cache.layer(layer_index), self.policy.page_size, self._bounds()
        tables, device = layer.block_tables[batch.row_index], query.device
        heads, most = tables.shape[1], max(batch.begins) // size + 1
        newest = batch.positions[:, None] // size  # [S, 1]
        page = torch.arange(most, device=device)
        ids = places(tables, page[None, None], self._pages_per_block)
        grouped = query.float().reshape(len(tables), heads, -1, query.shape[-1])
        scores = upper_bounds(grouped, lowest[ids].float(), largest[ids].float())
        scores = scores.masked_fill((page == newest)[:, None], torch.inf)
        scores = scores.masked_fill((page > newest)[:, None], -torch.inf)
        counts = on_device(torch.tensor(reads), device)[:, None].expand(-1, heads)
        chosen = top_positions(scores, counts, max(reads))  # ascending: the newest page, which may not be full, is last
        lengths = (counts - 1) * size + batch.positions[:, None] % size + 1
        self.cache.num_unread += (batch.positions[:, None] + 1 - lengths).sum()
        pages = small_pages(layer.key_pages, size), small_pages(layer.value_pages, size)
        tables = ids.gather(2, chosen).int()
        attended: Tensor = self._page_backend.paged_attention(
            query, *pages, tables, lengths.int(), scaling, sinks=layer.sinks
        )
        return attended
