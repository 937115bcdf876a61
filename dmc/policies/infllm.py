"""InfLLM (arXiv:2402.04617): the distant past in blocks, found by representative keys and read without positions."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmc.budget import Budget
from dmc.compression import rotate
from dmc.kernels.base import NewTokens
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import gather_slots, places
from dmc.kernels.probabilities import QUERY_BLOCK
from dmc.policies.attention import Cache, CacheAttention, Group, Phase, RotaryTables
from dmc.policies.reading import ReadingPolicy, top_positions


@dataclass(frozen=True, kw_only=True)
class InfLLM(ReadingPolicy):
    """Read the first tokens, the blocks that are most relevant to a chunk of queries, and a local window.

    A chunk is so many tokens of a prompt, or one generated token. A block is complete for a chunk when it is outside
    the window of all of its queries; what is neither in a complete block nor in the window is read as if chosen. All
    that is beyond the window lies at one distance, `local`. While the window and the first tokens, or the budget, hold
    everything, attention is exact.

    Differs from the authors' code: representatives are chosen for each KV head, not for every query head, and short
    contexts are exact, where theirs puts every token beyond the window at one distance. Their setting of 32 blocks is
    a budget of 128 + 4096 + 32 * 128 = 8320 tokens.

    Raises:
        ValueError: an option is out of range.
    """

    budget: Budget
    """Entries that are read: first tokens, window, and whole blocks, at least one; a ratio counts the prompt."""
    block_size: int = 128
    """Tokens of a block."""
    representatives: int = 4
    """Tokens of a block whose mean key stands for it: those with the most attention from the queries around them."""
    initial: int = 128
    """First tokens, which are always read."""
    local: int = 4096
    """Tokens of the window, the newest included."""
    chunk: int = 512
    """Queries of a prompt that read the same blocks."""

    def __post_init__(self) -> None:
        for name in ("block_size", "representatives", "local", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number >= 1")
        if self.initial < 0:
            raise ValueError(f"initial={self.initial}: expected a number of tokens >= 0")
        if self.representatives > self.block_size:
            raise ValueError(f"representatives={self.representatives}: a block has {self.block_size} tokens")

    @property
    def prompt_chunk(self) -> int | None:
        """See `CachePolicy`."""
        return self.chunk

    @property
    def can_fork(self) -> bool:
        """See `CachePolicy`: which blocks have keys is known beside the cache."""
        return False

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """The attention that entries receive, and a key for each block of the policy's, where its first entry lies."""
        keys = Field("block_key", torch.float32, "block", (layout.head_dim,), self.block_size)
        return keys, Field("received", torch.float32, "slot")

    def attention(self, cache: Cache, backend: ModuleType, rotary: RotaryTables) -> InfLLMAttention:
        """See `CachePolicy.attention`."""
        return InfLLMAttention(cache, backend, self, rotary)

    def num_blocks(self, prompt_length: int) -> int:
        """Blocks that a query reads, if there are as many."""
        return max(1, (self.budget.entries(prompt_length) - self.initial - self.local) // self.block_size)

    def num_complete(self, position: int) -> int:
        """Complete blocks for a chunk that begins at a position."""
        return max(0, position - self.local - self.initial) // self.block_size

    def exact_until(self, prompt_length: int) -> int:
        """Positions before this one read everything."""
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
    """Lets tokens in, then attends chunk by chunk; scores are computed here, for keys lie at two kinds of positions."""

    def __init__(self, cache: Cache, backend: ModuleType, policy: InfLLM, rotary: RotaryTables) -> None:
        super().__init__(cache, backend)
        self.policy, self._rotary = policy, rotary
        self._represented: dict[tuple[int, int], int] = {}  # blocks that have a key, by layer and row

    def attend(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `CacheAttention.attend`."""
        self.append(layer_index, tokens)
        nothing = torch.zeros(tokens.key.shape[:3], device=query.device)
        self.backend.write_notes(self.cache.layer(layer_index), group.rows, {"received": nothing})
        everything = Chunk(
            [place.row for place in group.places],
            group.rows,
            [place.begin for place in group.places],
            [place.prompt_end for place in group.places],
            query,
        )
        if Phase.PROMPT not in group.phase:
            return self._attend_chunk(layer_index, everything, scaling)
        attended = []
        for i in range(len(group.places)):
            own = everything.of([i])
            for first in range(0, query.shape[2], self.policy.chunk):
                chunk = own.queries(first, min(first + self.policy.chunk, query.shape[2]))
                attended.append(self._attend_chunk(layer_index, chunk, scaling))
        return torch.cat(attended, dim=2).unflatten(2, (len(group.places), -1))[0].transpose(0, 1)

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
        place = places(tables, where[:, None], layer.block_size)
        layer.notes["received"].view(-1).index_put_((place,), received, accumulate=True)
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
        keys = self._block_keys()[self._block_places(tables, torch.arange(num_blocks, device=tables.device))]
        return block_relevance(query.view(len(tables), tables.shape[1], -1, query.shape[-1]), keys)

    def _represent(self, layer_index: int, chunk: Chunk) -> None:
        """Give keys to the blocks that have become complete."""
        for i, (row, begin) in enumerate(zip(chunk.row_list, chunk.begins, strict=True)):
            old = self._represented.get((layer_index, row), 0) if begin > 0 else 0
            new = self._represented[layer_index, row] = max(old, self.policy.num_complete(begin))
            if new > old:
                blocks = torch.arange(old, new, device=chunk.rows.device)
                self._represent_blocks(layer_index, chunk.rows[i : i + 1], blocks)

    def _represent_blocks(self, layer_index: int, rows: Tensor, blocks: Tensor) -> None:
        """Keep the mean key, at position 0, of each block's tokens that have received most attention."""
        policy, layer = self.policy, self.cache.layer(layer_index)
        tables, size = layer.block_tables[rows], policy.block_size
        tokens = (policy.initial + blocks[:, None] * size + torch.arange(size, device=rows.device)).view(1, -1)
        received = gather_slots(layer.notes["received"], tables, tokens[:, None]).unflatten(2, (-1, size))
        count = torch.full(received.shape[:-1], policy.representatives, device=rows.device)
        chosen = top_positions(received, count, policy.representatives)  # [1, H, blocks, representatives]
        key = rotate(gather_slots(layer.key_pages, tables, tokens[:, None]).float(), *self._rotary(-tokens))
        key = key.unflatten(2, (-1, size))
        chosen_key = key.gather(3, chosen[..., None].expand(*chosen.shape, key.shape[-1]))
        self._block_keys()[self._block_places(tables, blocks)] = chosen_key.mean(3)

    def _block_keys(self) -> Tensor:
        return self.cache.fields["block_key"].flatten(0, 1)

    def _block_places(self, tables: Tensor, blocks: Tensor) -> Tensor:
        """Find the keys of the policy's blocks [n], where there are any, [S, H, n]."""
        size, first = self.cache.block_size, self.policy.initial + blocks * self.policy.block_size
        table = tables[:, :, first // size].long()
        return table * self.cache.fields["block_key"].shape[1] + first % size // self.policy.block_size


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Products of queries [S, H_q, n, D] with the keys [S, H, K, D] of their group's head, [S, H, group, n, K]."""
    grouped = query.reshape(len(key), key.shape[1], -1, *query.shape[2:])
    return grouped @ key[:, :, None].transpose(-1, -2)
