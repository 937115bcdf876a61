"""Runs a policy that evicts: shows it the attention, and does to the pages what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmc.compression import rotate
from dmc.kernels.base import NewTokens
from dmc.kernels.probabilities import attention_probabilities
from dmc.kernels.reference import gather_pages
from dmc.policies import Entries, EvictionPolicy, Rewrite
from dmc.policies.budgets import within
from dmc.runtime.cache_attention import CacheAttention, Group
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.policy.entry_notes import NoteLayout, NoteStore, places_of, rewrite_in_order
from dmc.runtime.sequence import Phase
from dmc.runtime.step import RotaryTables

POWERS = {"mass": 1, "squares": 2, "value_norm": 0}
"""Of the attention that a sum grows by."""


def note_layout(policy: EvictionPolicy, num_kv_heads: int, head_dim: int) -> NoteLayout:
    """Say what the cache keeps for a policy beside keys and values."""
    return NoteLayout(len(policy.sums), policy.evicts_decoding, policy.memory_size(num_kv_heads, head_dim))


@dataclass
class SeenLayer:
    """A layer of a prompt that waits for its final budget."""

    weight: float
    observed: Tensor | None
    """[1, H, N]."""


class Eviction(CacheAttention):
    """Attends to all that is held, then evicts: when a prompt ends, and after every generated token.

    The queries of a prompt see all of it. A sequence's layers are compressed one after the other as they end, where
    the policy does not have to see all of them first. Of a model that compresses by itself the entries are slots, which
    prompts alone give up: the window's queries then rank the slots that there are when the prompt ends.

    Args:
        cache: storage, with notes.
        backend: kernel module.
        policy: what stays.
        rotary: position ids [S, n] -> cos, sin [S, n, D], with which keys are turned further.
    """

    def __init__(self, cache: PagedCache, backend: ModuleType, policy: EvictionPolicy, rotary: RotaryTables) -> None:
        super().__init__(cache, backend)
        assert isinstance(cache.notes, NoteStore)
        self.policy, self._rotary = policy, rotary
        self._notes: NoteStore = cache.notes
        self._window: dict[tuple[int, int], Tensor] = {}  # last queries of the prompts being fed, by layer and row
        self._columns: dict[tuple[int, int], Tensor] = {}  # what their entries have received, likewise
        self._seen: dict[int, list[SeenLayer]] = {}  # layers of the prompts that end in this pass, by row
        self._longest, self._limits = 0, torch.zeros(0)  # of the generated tokens being fed: entries, and `_limits_of`

    def attend(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `CacheAttention.attend`."""
        is_prompt = Phase.PROMPT in group.phase
        if Phase.FIRST in group.phase:
            self._begin_prompt(layer_index, group)
        seen = self.append(layer_index, tokens)
        if self.cache.layout.compression is None:
            self._note(layer_index, group, tokens.value)
        if not is_prompt and self.policy.evicts_decoding:
            return self._decode(layer_index, group, query, scaling)
        attended = self.attend_to_all(layer_index, group, query, seen, scaling)
        if is_prompt:
            self._look(layer_index, group, query, seen.slots, scaling)
        if Phase.LAST in group.phase:
            for i, row in enumerate(group.rows.tolist()):
                window = self._window.pop((layer_index, row), None)
                self._end_prompt(layer_index, row, int(group.positions[i, -1]) + 1, window, scaling)
        return attended

    def _begin_prompt(self, layer_index: int, group: Group) -> None:
        """Bring what earlier turns left into the order of age."""
        layer = self.cache.layer(layer_index)
        for row in group.rows.tolist():
            self._window.pop((layer_index, row), None)
            self._columns.pop((layer_index, row), None)
            self._seen[row] = self._seen.get(row, []) if layer_index > 0 else []
            if self._notes.slot is not None and int(layer.lengths[row].max()) > 0:
                pages = [layer.key_pages, layer.value_pages]
                rewrite_in_order(pages, self._notes.slot, layer.block_tables[row][None], layer.lengths[row][None])

    def _note(self, layer_index: int, group: Group, value: Tensor) -> None:
        """Write the notes of entries that have just been appended, `value` [S, H, n, D] theirs."""
        sums = torch.zeros(len(self.policy.sums), *value.shape[:3], device=value.device)
        for column, name in zip(sums, self.policy.sums, strict=True):
            if name == "value_norm":
                column.copy_(value.float().abs().sum(-1))
        layer = self.cache.layer(layer_index)
        self.backend.note_tokens(layer, self._notes.pages, group.rows, group.positions, sums)

    def _look(self, layer_index: int, group: Group, query: Tensor, slots: Tensor, scaling: float) -> None:
        """Add the attention of a prompt's queries to the sums, and hold on to the last queries."""
        policy, layer = self.policy, self.cache.layer(layer_index)
        if policy.window:
            for row, own in zip(group.rows.tolist(), query, strict=True):
                before = self._window.get((layer_index, row))
                window = own if before is None else torch.cat((before, own), dim=1)
                self._window[layer_index, row] = window[:, -policy.window :].clone()
        if not {"mass", "squares"} & set(policy.sums):
            return
        entries = self._entries(layer_index, group.rows, group.positions[:, -1] + 1, int(slots.max()))
        columns, squares = self.backend.attention_received(query, layer, group.rows, slots, scaling)
        self._add(entries, group.rows, columns.mean(2), squares)
        if policy.needs_columns:
            for row, own in zip(group.rows.tolist(), columns, strict=True):
                before = self._columns.get((layer_index, row), own[..., :0])
                self._columns[layer_index, row] = own + pad(before, (0, own.shape[-1] - before.shape[-1]))

    def _add(self, entries: Entries, rows: Tensor, mass: Tensor, squares: Tensor) -> None:
        """Add to the sums of all entries, [S, H, N] each."""
        tables = self.cache.block_tables[entries.layer_index, rows]
        places = places_of(tables, entries.lengths, mass.shape[-1], self.cache.block_size)
        for column, name in zip(self._notes.sums, self.policy.sums, strict=True):
            if name != "value_norm":
                total = entries.sums[name] + (mass if name == "mass" else squares)
                entries.sums[name] = total.where(entries.exists, total[..., :1])  # there `places` means the first
                column.view(-1)[places] = entries.sums[name]

    def _decode(self, layer_index: int, group: Group, query: Tensor, scaling: float) -> Tensor:
        """Attend from one generated token, and evict at most one entry of each head."""
        policy, layer, rows, notes = self.policy, self.cache.layer(layer_index), group.rows, self._notes.pages
        if layer_index == 0:
            self._longest = int(self.cache.lengths[:, rows].max()) + 1  # the other layers have yet to append
            self._limits = self._limits_of(group)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        attended = self.backend.paged_attention(
            query[:, :, 0],
            *pages,
            layer.lengths,
            scaling,
            rows=rows,
            return_scores=policy.needs_row,
            num_scores=-(-self._longest // self.cache.block_size) * self.cache.block_size,
        )
        entries = self._entries(layer_index, rows, group.positions[:, -1] + 1, self._longest)
        if policy.needs_row:
            attended, scores = attended
            powers = [POWERS[name] for name in policy.sums]
            entries.row, sums = self.backend.note_attention(layer, notes, rows, scores, powers, self._longest)
            entries.sums = dict(zip(policy.sums, sums, strict=True))
        limits = self._limits[layer_index]
        ages = self.backend.lowest(policy.scores(entries, limits), entries.lengths, limits)
        if policy.merges:
            self._rewrite(entries, rows, policy.merge(entries, entries.ages == ages[..., None]))
        if entries.memory.numel() > 0:
            self._notes.memory[layer_index, rows] = entries.memory
        self.backend.evict(layer, notes, rows, ages)
        return attended[:, :, None]

    def _limits_of(self, group: Group) -> Tensor:
        """Entries that each head may hold after this generated token, [L, S]."""
        if not self.policy.grows:
            return self._notes.limits[:, group.rows].long()
        seen = (group.positions[:, -1] + 1).tolist()
        limits = torch.tensor([self.policy.budget.entries(count) for count in seen], device=group.rows.device)
        return limits.expand(self.cache.layout.num_layers, -1)

    def _end_prompt(self, layer_index: int, row: int, tokens_seen: int, window: Tensor | None, scaling: float) -> None:
        """Compress a layer whose prompt has ended, and earlier ones with it if the policy weighs layers."""
        policy, num_layers = self.policy, self.cache.layout.num_layers
        limit = max(1, policy.budget.entries(tokens_seen) - self.cache.layout.delay)  # delayed tokens count
        self._notes.limits[layer_index, row] = self._notes.nominal[layer_index, row] = limit
        if tokens_seen <= limit:
            return
        layer, rows = self.cache.layer(layer_index), torch.tensor([row], device=self.cache.layout.device)
        length = int(layer.lengths[row].max())
        if length == 0:  # delayed gates hold back all there is
            return
        entries = self._entries(layer_index, rows, torch.tensor([tokens_seen], device=rows.device), length)
        if window is not None:
            slots = (entries.lengths[..., None] + torch.arange(1 - window.shape[1], 1, device=rows.device)).clamp_min(1)
            (entries.rows,) = attention_probabilities(window[None], layer, rows, slots, scaling)
            entries.row = entries.rows[..., -1, :].mean(2)
        seen = self._seen[row]
        if (columns := self._columns.pop((layer_index, row), None)) is not None:
            entries.columns = columns[None]
        entries.observed = policy.observe(entries, limit)
        seen.append(SeenLayer(policy.layer_weight(entries, limit), entries.observed))
        self._notes.memory[layer_index, rows] = entries.memory
        held = self._held(layer_index, row, tokens_seen)
        if not policy.adapts_layers:
            budgets = policy.layer_budgets([1.0] * num_layers, limit, num_layers, tokens_seen)
            if self.cache.layout.compression is None or min(budgets) < max(budgets):
                budgets = within(budgets, held)  # equal budgets do not make up for what gates leave in some layers
            self._compress(entries, rows, budgets[layer_index], seen[-1])
        elif policy.recompresses or layer_index == num_layers - 1:
            budgets = policy.layer_budgets([each.weight for each in seen], limit, num_layers, tokens_seen)
            for index, budget in enumerate(within(budgets, held[: len(seen)])):
                num_entries = int(self.cache.lengths[index, row].max())
                self._compress(self._entries(index, rows, entries.tokens_seen, num_entries), rows, budget, seen[index])
        if layer_index == num_layers - 1:
            del self._seen[row]

    def _held(self, layer_index: int, row: int, tokens_seen: int) -> list[int]:
        """Entries per head, averaged and rounded up, that each layer chooses from; those to come at most so many."""
        held = -(-self.cache.lengths[:, row].sum(-1) // self.cache.layout.num_kv_heads)
        held[layer_index + 1 :] += tokens_seen - int(self.cache.tokens_seen[row])  # which they have yet to append
        return held.tolist()

    def _compress(self, entries: Entries, rows: Tensor, budget: int, seen: SeenLayer) -> None:
        """Bring a layer of one sequence, in the order of age, down to its budget."""
        self._notes.limits[entries.layer_index, rows] = budget
        entries.observed = seen.observed
        keep = self.policy.keep(entries, budget) & entries.exists
        if bool((keep == entries.exists).all()):
            return
        if self.policy.merges and bool(keep.any()):  # nothing is kept where scores are no numbers
            self._rewrite(entries, rows, self.policy.merge(entries, entries.exists & ~keep))
        self._notes.memory[entries.layer_index, rows] = entries.memory
        layer = self.cache.layer(entries.layer_index)
        tables = layer.block_tables[rows]
        self._notes.compact(tables, keep)
        if seen.observed is not None:
            seen.observed = compacted(seen.observed, keep)
        beyond = tables.shape[-1] * layer.block_size - keep.shape[-1]
        self.backend.compact(layer, rows, pad(keep, (0, beyond)))

    def _rewrite(self, entries: Entries, rows: Tensor, rewrite: Rewrite | None) -> None:
        """Write the new keys and values of entries that stay."""
        if rewrite is None:
            return
        layer = self.cache.layer(entries.layer_index)
        tables, block_size = layer.block_tables[rows].long(), layer.block_size
        chosen, age = rewrite.ages >= 0, rewrite.ages.clamp_min(0)
        slot = age
        if self._notes.slot is not None:
            place = tables.gather(2, age // block_size) * block_size + age % block_size
            slot = self._notes.slot.view(-1)[place].long()
        place = (tables.gather(2, slot // block_size) * block_size + slot % block_size)[chosen]
        for pages, states in ((layer.key_pages, rewrite.key), (layer.value_pages, rewrite.value)):
            if states is not None:
                pages.view(-1, pages.shape[-1])[place] = states[chosen].to(pages.dtype)

    def _entries(self, layer_index: int, rows: Tensor, tokens_seen: Tensor, num_entries: int) -> Entries:
        layer, notes = self.cache.layer(layer_index), self._notes

        def gather(pages: Tensor) -> Tensor:
            return gather_pages(pages, layer.block_tables[rows], num_entries)

        def read(pages: Tensor) -> Tensor:
            states = gather(pages)
            if notes.slot is None:
                return states
            slot = gather(notes.slot).long().clamp(0, num_entries - 1)
            return states.gather(2, slot[..., None].expand_as(states))

        def turn(states: Tensor, positions: Tensor) -> Tensor:
            cos, sin = self._rotary(positions)
            return rotate(states.float(), cos, sin)

        return Entries(
            layer_index=layer_index,
            num_layers=self.cache.layout.num_layers,
            lengths=layer.lengths[rows].long(),
            num_entries=num_entries,
            tokens_seen=tokens_seen,
            memory=notes.memory[layer_index, rows],
            nominal=notes.nominal[layer_index, rows].long(),
            read_positions=lambda: gather(notes.position).long(),
            read_sums=lambda: dict(zip(self.policy.sums, map(gather, notes.sums), strict=True)),
            read_keys=lambda: read(layer.key_pages),
            read_values=lambda: read(layer.value_pages),
            rotate=turn,
        )


def compacted(states: Tensor, keep: Tensor) -> Tensor:
    """Move what is kept of [S, H, N] to the front of each head; -inf behind it."""
    moved = torch.full_like(states, -torch.inf)
    sequence, head, _ = keep.nonzero(as_tuple=True)
    moved[sequence, head, (keep.cumsum(-1) - 1)[keep]] = states[keep]
    return moved[..., : int(keep.sum(-1).max())]
