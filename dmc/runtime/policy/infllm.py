"""Runs InfLLM: chunks of queries read first tokens, blocks and a window; attention says what stands for a block."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmc.compression import rotate
from dmc.kernels.base import NewTokens
from dmc.kernels.reference import QUERY_BLOCK
from dmc.policies.infllm import InfLLM, block_relevance
from dmc.policies.reading import top_positions
from dmc.runtime.cache_attention import CacheAttention, Group
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.policy.infllm_memory import BlockMemory
from dmc.runtime.policy.reading import gather_slots
from dmc.runtime.sequence import Phase
from dmc.runtime.step import RotaryTables


@dataclass
class Chunk:
    """Queries that read the same blocks: several of one sequence, or one of several."""

    row_list: list[int]
    rows: Tensor
    """The same on the device, [S]."""
    begins: list[int]
    """Position of each sequence's first query."""
    prompt_ends: list[int]
    query: Tensor
    """Rotated at its positions, [S, H_q, n, D]."""

    @property
    def positions(self) -> Tensor:
        """Of the queries, int64 [S, n]."""
        begins = torch.tensor(self.begins, device=self.rows.device)[:, None]
        return begins + torch.arange(self.query.shape[2], device=self.rows.device)

    def of(self, members: list[int]) -> Chunk:
        """Take some sequences."""
        lists = ([each[i] for i in members] for each in (self.row_list, self.begins, self.prompt_ends))
        row_list, begins, prompt_ends = lists
        return Chunk(row_list, self.rows[members], begins, prompt_ends, self.query[members])

    def queries(self, first: int, end: int) -> Chunk:
        """Take queries first..end-1 of each sequence."""
        begins = [begin + first for begin in self.begins]
        return Chunk(self.row_list, self.rows, begins, self.prompt_ends, self.query[:, :, first:end])


class InfLLMAttention(CacheAttention):
    """Lets tokens in, then attends chunk by chunk; scores are computed here, for keys lie at two kinds of positions.

    Args:
        cache: storage; its side store keeps what entries receive, and the blocks' keys.
        backend: kernel module, for appending.
        policy: what is read.
        rotary: position ids [S, n] -> cos, sin [S, n, D].
    """

    def __init__(self, cache: PagedCache, backend: ModuleType, policy: InfLLM, rotary: RotaryTables) -> None:
        super().__init__(cache, backend)
        assert isinstance(cache.notes, BlockMemory)
        self.policy, self._memory, self._rotary = policy, cache.notes, rotary

    def attend(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `CacheAttention.attend`."""
        self.append(layer_index, tokens)
        self._memory.begin(self.cache.block_tables[layer_index, group.rows], group.positions)
        places = group.places
        everything = Chunk(
            [place.row for place in places],
            group.rows,
            [place.begin for place in places],
            [place.prompt_end for place in places],
            query,
        )
        if Phase.PROMPT not in group.phase:
            return self._attend_chunk(layer_index, everything, scaling)
        attended = []
        for i in range(len(places)):
            own = everything.of([i])
            for first in range(0, query.shape[2], self.policy.chunk):
                chunk = own.queries(first, min(first + self.policy.chunk, query.shape[2]))
                attended.append(self._attend_chunk(layer_index, chunk, scaling))
        return torch.cat(attended, dim=2).unflatten(2, (len(places), -1))[0].transpose(0, 1)

    def _attend_chunk(self, layer_index: int, chunk: Chunk, scaling: float) -> Tensor:
        """Attend from a chunk's queries, [S, H_q, n, D]."""
        self._represent(layer_index, chunk)
        sequences, _, num_new, _ = chunk.query.shape
        exact = [
            min(max(self.policy.exact_until(end) - begin, 0), num_new)
            for begin, end in zip(chunk.begins, chunk.prompt_ends, strict=True)
        ]
        if min(exact) == num_new:
            return self._read(layer_index, chunk, None, scaling)
        if max(exact) == 0:
            return self._read(layer_index, chunk, self._far(layer_index, chunk), scaling)
        if sequences == 1:
            far = self._far(layer_index, chunk)
            near_part, far_part = chunk.queries(0, exact[0]), chunk.queries(exact[0], num_new)
            return torch.cat(
                (self._read(layer_index, near_part, None, scaling), self._read(layer_index, far_part, far, scaling)), 2
            )
        attended = torch.empty_like(chunk.query)
        for members in ([i for i, each in enumerate(exact) if each], [i for i, each in enumerate(exact) if not each]):
            attended[members] = self._attend_chunk(layer_index, chunk.of(members), scaling)
        return attended

    def _read(self, layer_index: int, chunk: Chunk, far: Tensor | None, scaling: float) -> Tensor:
        """Attend to the window with its own positions and to `far` [S, K] at one distance; without it to everything."""
        layer, local, positions = self.cache.layer(layer_index), self.policy.local, chunk.positions
        tables, last = layer.block_tables[chunk.rows], positions[:, -1:]
        if far is None:
            near = torch.arange(int(max(chunk.begins)) + positions.shape[1], device=last.device).expand(len(tables), -1)
        else:
            near = positions[:, :1] + torch.arange(1 - local, positions.shape[1], device=last.device)
        where = near.clamp_min(0).minimum(last)
        key = gather_slots(layer.key_pages, tables, where[:, None]).float()
        value = gather_slots(layer.value_pages, tables, where[:, None]).float()
        query = chunk.query.float() * scaling
        far_query, far_key = query[:, :, :, :0], key[:, :, :0]
        if far is not None:
            far_query = rotate(query, *self._rotary(local - positions))
            inside = far.clamp_min(0).minimum(last)[:, None]
            far_key = rotate(gather_slots(layer.key_pages, tables, inside).float(), *self._rotary(-far))
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
                beyond = _scores(far_query[:, :, block], far_key).masked_fill(~is_far[:, None, None], -torch.inf)
                scores = torch.cat((scores, beyond), dim=-1)
            weights = scores.softmax(-1)  # [S, H, group, queries, keys]
            outputs.append((weights @ value[:, :, None]).flatten(1, 2))
            received += (weights[..., : near.shape[1]].mean(2) * in_window[:, None]).sum(2)
        self._memory.add(tables, where, received)
        return torch.cat(outputs, dim=2).to(chunk.query.dtype)

    def _far(self, layer_index: int, chunk: Chunk) -> Tensor:
        """Find what a chunk reads beyond its window: positions [S, K], -1 for none."""
        policy, device, num_new = self.policy, chunk.rows.device, chunk.query.shape[2]
        complete = [policy.num_complete(begin) for begin in chunk.begins]
        sequences, size, most = len(complete), policy.block_size, max(complete)
        end = policy.initial + torch.tensor(complete, device=device)[:, None] * size
        parts = [torch.arange(policy.initial, device=device).expand(sequences, -1)]
        if most > 0:
            counts = [min(policy.num_blocks(e), c) for e, c in zip(chunk.prompt_ends, complete, strict=True)]
            relevance = self._relevance(layer_index, chunk, most)
            exists = torch.arange(most, device=device) < torch.tensor(complete, device=device)[:, None]
            relevance = relevance.masked_fill(~exists, -torch.inf)
            chosen = top_positions(relevance, torch.tensor(counts, device=device), max(counts))
            first = policy.initial + chosen * size
            tokens = first[..., None] + torch.arange(size, device=device)
            is_chosen = torch.arange(chosen.shape[1], device=device) < torch.tensor(counts, device=device)[:, None]
            parts.append(tokens.where(is_chosen[..., None], -1).flatten(1))
        parts.append(end + torch.arange(size + num_new - 1, device=device))  # complete blocks end less than a block ago
        return torch.cat(parts, dim=1)

    def _relevance(self, layer_index: int, chunk: Chunk, num_blocks: int) -> Tensor:
        """Relevance of the first blocks to a chunk, [S, num_blocks]."""
        tables = self.cache.block_tables[layer_index, chunk.rows]
        query = rotate(chunk.query.float(), *self._rotary(self.policy.local - chunk.positions)).mean(2)
        keys = self._memory.keys(tables, torch.arange(num_blocks, device=tables.device))
        return block_relevance(query.view(len(tables), tables.shape[1], -1, query.shape[-1]), keys)

    def _represent(self, layer_index: int, chunk: Chunk) -> None:
        """Give keys to the blocks that have become complete."""
        for i, (row, begin) in enumerate(zip(chunk.row_list, chunk.begins, strict=True)):
            old, new = int(self._memory.num_represented[layer_index, row]), self.policy.num_complete(begin)
            if new > old:
                self._memory.num_represented[layer_index, row] = new
                blocks = torch.arange(old, new, device=chunk.rows.device)
                self._represent_blocks(layer_index, chunk.rows[i : i + 1], blocks)

    def _represent_blocks(self, layer_index: int, rows: Tensor, blocks: Tensor) -> None:
        """Keep the mean key, at position 0, of each block's tokens that have received most attention."""
        policy, layer = self.policy, self.cache.layer(layer_index)
        tables, size = layer.block_tables[rows], policy.block_size
        tokens = (policy.initial + blocks[:, None] * size + torch.arange(size, device=rows.device)).view(1, -1)
        received = self._memory.received(tables, tokens).unflatten(2, (-1, size))
        count = torch.full(received.shape[:-1], policy.representatives, device=rows.device)
        chosen = top_positions(received, count, policy.representatives)  # [1, H, blocks, representatives]
        key = rotate(gather_slots(layer.key_pages, tables, tokens[:, None]).float(), *self._rotary(-tokens))
        key = key.unflatten(2, (-1, size))
        chosen_key = key.gather(3, chosen[..., None].expand(*chosen.shape, key.shape[-1]))
        self._memory.represent(tables, blocks, chosen_key.mean(3))


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Products of queries [S, H_q, n, D] with the keys [S, H, K, D] of their group's head, [S, H, group, n, K]."""
    grouped = query.reshape(len(key), key.shape[1], -1, *query.shape[2:])
    return grouped @ key[:, :, None].transpose(-1, -2)
