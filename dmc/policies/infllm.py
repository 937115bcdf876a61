"""InfLLM (arXiv:2402.04617): distant tokens in blocks, found by representative keys and read without positions."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import Count, NonNegative, checked_dataclass
from dmc.kernels.base import NewTokens
from dmc.kernels.batch import ForwardBatch, on_device
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import gather_slots, places
from dmc.kernels.probabilities import QUERY_BLOCK, softmax_with_sinks
from dmc.policies.layer_attention import Cache, CacheAttention, Rotary
from dmc.policies.reading import ReadingPolicy, top_positions


@checked_dataclass(frozen=True, kw_only=True)
class InfLLM(ReadingPolicy):
    """Read the first tokens, the blocks that are most relevant to a chunk of queries, and a local window.

    A chunk is `chunk` tokens of a prompt, or one generated token. A block is complete for a chunk when it is outside
    the window of all of its queries; tokens that are neither in a complete block nor in the window are always read. All
    tokens beyond the window are read at one distance, `local`. While the window and the first tokens, or the budget,
    cover everything, attention is exact. A block's relevance is the inner product of the chunk's mean query and the
    mean key of its `representatives`, summed over query heads.

    Differs from the authors' code: each KV head, not every query head, has representatives. Short contexts are exact;
    their code puts every token beyond the window at one distance. Their 32 blocks are a budget of
    128 + 4096 + 32 * 128 = 8320 tokens.
    """

    budget: Budget
    """Entries that are read: first tokens, window, and whole blocks, at least one; a ratio is of the prompt."""
    block_size: Count = 128
    """Tokens of a block."""
    representatives: Count = 4
    """Tokens whose mean key represents a block: those with the most attention from the queries around them."""
    initial: NonNegative = 128
    """First tokens, which are always read."""
    local: Count = 4096
    """Tokens of the window, the newest included."""
    chunk: Count = 512
    """Number of a prompt's queries that read the same blocks."""

    def __post_init__(self) -> None:
        if self.representatives > self.block_size:
            raise ValueError(f"representatives={self.representatives}: expected at most block_size={self.block_size}")

    @property
    @override
    def prompt_chunk(self) -> int | None:
        return self.chunk

    @property
    @override
    def rotates(self) -> bool:
        return True

    @property
    def can_fork(self) -> bool:
        """See `CachePolicy`: which blocks have keys is known beside the cache."""
        return False

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """The attention that entries receive, and a key for each of the policy's blocks, stored at its first entry."""
        keys = Field("block_key", torch.float32, "block", (layout.head_dim,), self.block_size)
        return keys, Field("received", torch.float32, "slot")

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> InfLLMAttention:
        assert rotary is not None
        return InfLLMAttention(cache, backend, self, rotary)

    def num_blocks(self, prompt_length: int) -> int:
        """Number of blocks that a query reads, if there are as many."""
        return max(1, (self.budget.entries(prompt_length) - self.initial - self.local) // self.block_size)

    def num_complete(self, position: int) -> int:
        """Number of complete blocks for a chunk that begins at a position."""
        return max(0, position - self.local - self.initial) // self.block_size

    def exact_until(self, prompt_length: int) -> int:
        """Return the position before which queries read everything."""
        return max(self.initial + self.local, self.budget.entries(prompt_length))


def block_relevance(query: Tensor, representative: Tensor) -> Tensor:
    """Inner product of a chunk's mean query with each block's key, summed over all query heads.

    Args:
        query: [S, H, group, D].
        representative: [S, H, blocks, D].
    Returns:
        [S, blocks].
    """
    return (representative @ query.sum(2)[..., None])[..., 0].sum(1)


class InfLLMAttention(CacheAttention):
    """Appends tokens, then attends chunk by chunk with scores of its own, for keys have two kinds of positions."""

    def __init__(self, cache: Cache, backend: ModuleType, policy: InfLLM, rotary: Rotary) -> None:
        super().__init__(cache, backend)
        self.policy, self._rotary = policy, rotary
        self._represented: dict[tuple[int, int], int] = {}  # number of blocks with a key, by layer and row

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        self.append(layer_index, batch, tokens)
        nothing = torch.zeros(tokens.key.shape[:2], device=query.device)
        self.backend.write_metadata(self.cache.layer(layer_index), batch, {"received": nothing})

        def attend_part(part: ForwardBatch, where: Tensor | slice) -> Tensor:
            if not part.is_prompt:
                return self._attend_chunk(layer_index, part, query[where], scaling)
            part_query, size = query[where], self.policy.chunk
            return torch.cat(
                [
                    self._attend_chunk(layer_index, one.cut(first, end), part_query[span][first:end], scaling)
                    for i, span in enumerate(part.spans)
                    for one in (part.part([i])[0],)
                    for first, end in ((at, min(at + size, one.most_new)) for at in range(0, one.most_new, size))
                ]
            )

        return self.by_phase(batch, query, attend_part)

    def _attend_chunk(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float) -> Tensor:
        """Attend from queries that read the same blocks: several of one sequence, or one of several; [T, H_q, D]."""
        self._represent(layer_index, batch)
        num_new = batch.most_new
        exact = [
            min(max(self.policy.exact_until(end) - begin, 0), num_new)
            for begin, end in zip(batch.begins, batch.prompt_ends, strict=True)
        ]
        if min(exact) == num_new:
            return self._read(layer_index, batch, query, None, scaling)
        if max(exact) == 0:
            return self._read(layer_index, batch, query, self._far(layer_index, batch, query), scaling)
        if len(batch.rows) == 1:
            far, near = self._far(layer_index, batch, query), exact[0]
            parts = (
                self._read(layer_index, batch.cut(0, near), query[:near], None, scaling),
                self._read(layer_index, batch.cut(near, num_new), query[near:], far, scaling),
            )
            return torch.cat(parts)
        attended = torch.empty_like(query)
        for members in (
            [i for i, count in enumerate(exact) if count],
            [i for i, count in enumerate(exact) if not count],
        ):
            part, where = batch.part(members)
            attended[where] = self._attend_chunk(layer_index, part, query[where], scaling)
        return attended

    def _read(self, layer_index: int, batch: ForwardBatch, query: Tensor, far: Tensor | None, scaling: float) -> Tensor:
        """Attend to the window at its own positions and to `far` [S, K] at one distance; None: to everything."""
        layer, local, positions = self.cache.layer(layer_index), self.policy.local, batch.pad(batch.positions)
        tables, last = layer.block_tables[batch.row_index], positions[:, -1:]
        if far is None:
            near = torch.arange(max(batch.ends), device=last.device).expand(len(tables), -1)
        else:
            near = positions[:, :1] + torch.arange(1 - local, positions.shape[1], device=last.device)
        where = near.clamp_min(0).minimum(last)
        key = gather_slots(layer.key_pages, tables, where[:, None]).float()
        value = gather_slots(layer.value_pages, tables, where[:, None]).float()
        dtype, query = query.dtype, batch.pad(query).transpose(1, 2).float() * scaling
        far_query, far_key = query[:, :, :, :0], key[:, :, :0]
        if far is not None:
            far_query = self._rotary.turn_queries(layer_index, query, local - positions)
            inside = far.clamp_min(0).minimum(last)[:, None]
            far_key = self._rotary.turn_keys(layer_index, gather_slots(layer.key_pages, tables, inside), -far)
            value = torch.cat((value, gather_slots(layer.value_pages, tables, inside).float()), dim=2)
        outputs, received = [], key.new_zeros(key.shape[:3])
        for block in torch.arange(positions.shape[1], device=last.device).split(QUERY_BLOCK):
            at = positions[:, block, None]
            seen = (near[:, None] >= 0) & (near[:, None] <= at)
            in_window = near[:, None] > at - local
            if far is not None:
                seen &= in_window
            scores = _scores(query[:, :, block], key).masked_fill(~seen[:, None, None], -torch.inf)
            if far is not None:
                is_far = (far[:, None] >= 0) & (far[:, None] <= at - local)
                read = seen.sum(-1, keepdim=True) + is_far.sum(-1, keepdim=True)
                self.cache.num_unread += key.shape[1] * (at + 1 - read).sum()
                beyond = _scores(far_query[:, :, block], far_key).masked_fill(~is_far[:, None, None], -torch.inf)
                scores = torch.cat((scores, beyond), dim=-1)
            weights = softmax_with_sinks(scores, layer.sinks)  # [S, H, group, queries, keys]
            outputs.append((weights @ value[:, :, None]).flatten(1, 2))
            received += (weights[..., : near.shape[1]].mean(2) * in_window[:, None]).sum(2)
        place = places(tables, where[:, None], layer.block_size)
        layer.entry_metadata["received"].view(-1).index_put_((place,), received, accumulate=True)
        return batch.unpad(torch.cat(outputs, dim=2).transpose(1, 2)).to(dtype)

    def _far(self, layer_index: int, batch: ForwardBatch, query: Tensor) -> Tensor:
        """Return the positions that a chunk reads beyond its window, [S, K], -1 for none."""
        policy, device, num_new = self.policy, query.device, batch.most_new
        complete = [policy.num_complete(begin) for begin in batch.begins]
        sequences, size, most = len(complete), policy.block_size, max(complete)
        num_complete = on_device(torch.tensor(complete), device)
        end = policy.initial + num_complete[:, None] * size
        parts = [torch.arange(policy.initial, device=device).expand(sequences, -1)]
        if most > 0:
            counts = [min(policy.num_blocks(e), c) for e, c in zip(batch.prompt_ends, complete, strict=True)]
            relevance = self._relevance(layer_index, batch, query, most)
            exists = torch.arange(most, device=device) < num_complete[:, None]
            relevance = relevance.masked_fill(~exists, -torch.inf)
            num_chosen = on_device(torch.tensor(counts), device)
            chosen = top_positions(relevance, num_chosen, max(counts))
            first = policy.initial + chosen * size
            tokens = first[..., None] + torch.arange(size, device=device)
            is_chosen = torch.arange(chosen.shape[1], device=device) < num_chosen[:, None]
            parts.append(tokens.where(is_chosen[..., None], -1).flatten(1))
        parts.append(end + torch.arange(size + num_new - 1, device=device))  # complete blocks end less than a block ago
        return torch.cat(parts, dim=1)

    def _relevance(self, layer_index: int, batch: ForwardBatch, query: Tensor, num_blocks: int) -> Tensor:
        """Relevance of the first blocks to a chunk, [S, num_blocks]."""
        tables, positions = self.cache.block_tables[layer_index, batch.row_index], batch.pad(batch.positions)
        query = batch.pad(query).transpose(1, 2).float()
        query = self._rotary.turn_queries(layer_index, query, self.policy.local - positions).mean(2)
        keys = self._block_keys()[self._block_places(tables, torch.arange(num_blocks, device=tables.device))]
        return block_relevance(query.view(len(tables), tables.shape[1], -1, query.shape[-1]), keys)

    def _represent(self, layer_index: int, batch: ForwardBatch) -> None:
        """Compute the keys of blocks that have become complete."""
        for i, (row, begin) in enumerate(zip(batch.rows, batch.begins, strict=True)):
            old = self._represented.get((layer_index, row), 0) if begin > 0 else 0
            new = self._represented[layer_index, row] = max(old, self.policy.num_complete(begin))
            if new > old:
                blocks = torch.arange(old, new, device=batch.row_index.device)
                self._represent_blocks(layer_index, batch.row_index[i : i + 1], blocks)

    def _represent_blocks(self, layer_index: int, rows: Tensor, blocks: Tensor) -> None:
        """Store the mean key, at position 0, of each block's tokens that have received the most attention."""
        policy, layer = self.policy, self.cache.layer(layer_index)
        tables, size = layer.block_tables[rows], policy.block_size
        tokens = (policy.initial + blocks[:, None] * size + torch.arange(size, device=rows.device)).view(1, -1)
        received = gather_slots(layer.entry_metadata["received"], tables, tokens[:, None]).unflatten(2, (-1, size))
        count = torch.full(received.shape[:-1], policy.representatives, device=rows.device)
        chosen = top_positions(received, count, policy.representatives)  # [1, H, blocks, representatives]
        key = self._rotary.turn_keys(layer_index, gather_slots(layer.key_pages, tables, tokens[:, None]), -tokens)
        key = key.unflatten(2, (-1, size))
        chosen_key = key.gather(3, chosen[..., None].expand(*chosen.shape, key.shape[-1]))
        self._block_keys()[self._block_places(tables, blocks)] = chosen_key.mean(3)

    def _block_keys(self) -> Tensor:
        return self.cache.fields["block_key"].flatten(0, 1)

    def _block_places(self, tables: Tensor, blocks: Tensor) -> Tensor:
        """Return the indices of the keys of the policy's blocks [n], where there are any, [S, H, n]."""
        size, first = self.cache.block_size, self.policy.initial + blocks * self.policy.block_size
        table = tables[:, :, first // size].long()
        return table * self.cache.fields["block_key"].shape[1] + first % size // self.policy.block_size


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Products of queries [S, H_q, n, D] with the keys [S, H, K, D] of their group's head, [S, H, group, n, K]."""
    grouped = query.reshape(len(key), key.shape[1], -1, *query.shape[2:])
    return grouped @ key[:, :, None].transpose(-1, -2)
