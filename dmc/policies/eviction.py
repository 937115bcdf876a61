"""Eviction: the attention that collects the inputs of a method, and executes its choices."""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from dmc.kernels.base import NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch, Phase
from dmc.kernels.pages import gather_pages, places
from dmc.kernels.probabilities import attention_probabilities
from dmc.policies.base import Entries, PromptState, SeenLayer
from dmc.policies.budgets import entries_allowed, mean_held, within
from dmc.policies.eviction_method import EvictionMethod
from dmc.policies.layer_attention import Cache, CacheAttention, Rotary
from dmc.policies.merging import rewrite
from dmc.policies.protection import Protector, split_positions

POWERS = {"mass": 1, "squares": 2}  # of the attention that each sum accumulates


class Eviction(CacheAttention):
    """Attends to all entries, then evicts: when a prompt ends, and after every generated token.

    The queries of a prompt see all of it. Layers are compressed one by one as they finish, unless the policy needs all
    of them first. Slots of learned gates are evicted only when a prompt ends: the window's queries rank them.
    """

    def __init__(self, cache: Cache, backend: ModuleType, policy: EvictionMethod, rotary: Rotary | None) -> None:
        super().__init__(cache, backend)
        self.policy, self._given_rotary, self._protector = policy, rotary, Protector(policy, self)
        self._powers = {name: POWERS[name] for name in policy.sums if name in POWERS}
        self._has_positions = cache.layout.compression is None
        self._prompts: dict[tuple[int, int], PromptState] = defaultdict(PromptState)  # by layer and row
        self._seen: dict[int, list[SeenLayer]] = {}  # layers of prompts that end in this pass, by row
        self._lengths: dict[int, list[list[int]]] = {}  # what their layers and heads hold before it, by row
        self._longest, self._limits = 0, torch.zeros(0)  # of this pass's generated tokens: entries, and `_limits_of`
        self._metadata: dict[str, Tensor] = {}  # of this pass's tokens, the same in all layers

    @override
    def attend(self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        for row, phase in zip(batch.rows, batch.phases, strict=True):
            if Phase.FIRST in phase:
                self._prompts[layer_index, row] = PromptState()
                self._seen[row] = self._seen.get(row, []) if layer_index > 0 else []
        if layer_index == 0 and (rows := [r for r, p in zip(batch.rows, batch.phases, strict=True) if Phase.LAST in p]):
            self._lengths = dict(zip(rows, self.cache.lengths[:, rows].transpose(0, 1).tolist(), strict=True))
            self._protector.rank(rows, batch)
        seen = self.append(layer_index, batch, tokens)
        if self._has_positions:
            self._write_metadata(layer_index, batch, tokens.value)

        def attend_part(part: ForwardBatch, where: Tensor | slice) -> Tensor:
            if self.policy.evicts_decoding and not part.is_prompt:
                return self._decode(layer_index, part, query[where], scaling)
            part_seen = seen if part is batch else VisibleKeys(seen.slots[where], is_causal=seen.is_causal)
            attend = self._attend_and_sum if self._powers and part.is_prompt else self.attend_to_all
            return attend(layer_index, part, query[where], part_seen, scaling)

        if self.policy.evicts_decoding or self._powers:
            attended = self.by_phase(batch, query, attend_part)
        else:
            attended = self.attend_to_all(layer_index, batch, query, seen, scaling)
        for part, where in batch.by_phase:
            if part.is_prompt:
                self._look(layer_index, part, query[where], scaling)
        for index, phase in enumerate(batch.phases):
            if Phase.LAST in phase:
                self._end_prompt(layer_index, batch, index, scaling)
        return attended

    @property
    def _rotary(self) -> Rotary:
        if self._given_rotary is None:
            raise TypeError(f"{type(self.policy).__name__} turns queries or keys: let its `rotates` say so")
        return self._given_rotary

    def _write_metadata(self, layer_index: int, batch: ForwardBatch, value: Tensor) -> None:
        """Write the metadata of entries that have just been appended; `value` [T, H, D] is theirs."""
        if layer_index == 0:
            self._metadata = {"position": batch.positions.int()[:, None].expand(value.shape[:2]).contiguous()}
            nothing = torch.zeros(value.shape[:2], device=value.device)
            self._metadata |= dict.fromkeys(self.policy.sums, nothing)
        if "value_norm" in self._metadata:
            self._metadata["value_norm"] = value.float().abs().sum(-1)
        self.backend.write_metadata(self.cache.layer(layer_index), batch, self._metadata)

    def _look(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float) -> None:
        """Keep the last queries of prompts, and what the policy gathers."""
        policy = self.policy
        for row, span, begin in zip(batch.rows, batch.spans, batch.begins, strict=True):
            state = self._prompts[layer_index, row]
            if policy.window:
                new = query[span].transpose(0, 1)
                window = new if state.window is None else torch.cat((state.window, new), dim=1)
                state.window = window[:, -policy.window :].clone()
            if policy.gathers:
                back = -torch.arange(begin, begin + span.stop - span.start, device=query.device)[None]
                rotated = query[None, span].transpose(1, 2).float() * scaling
                unrotated = self._rotary.turn_queries(layer_index, rotated, back)[0]
                state.gathered = policy.gather(state.gathered, unrotated, begin)

    def _attend_and_sum(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, seen: VisibleKeys, scaling: float
    ) -> Tensor:
        """Attend from prompt tokens, and add what entries receive to the sums."""
        layer = self.cache.layer(layer_index)
        pages, options = (layer.key_pages, layer.value_pages, layer.block_tables), (layer.scales, True, layer.sinks)
        attended, lse = self.backend.prefill_attention(query, *pages, batch, seen, scaling, *options)
        columns, squares = self.backend.attention_received(query, layer, batch, seen.slots, scaling, lse)
        received = {"mass": columns.mean(2), "squares": squares}
        every = torch.arange(columns.shape[-1], device=query.device)[None, None]
        place = places(layer.block_tables[batch.row_index], every, layer.block_size)
        for name in self._powers:  # 0 beyond the length, wherever that leads
            layer.entry_metadata[name].view(-1).index_put_((place,), received[name], accumulate=True)
        for row, new in zip(batch.rows, columns, strict=True) if self.policy.needs_prompt_attention else ():
            state = self._prompts[layer_index, row]
            if state.received is not None:
                new = new + pad(state.received, (0, new.shape[-1] - state.received.shape[-1]))
            state.received = new
        return attended  # type: ignore[no-any-return]

    def _decode(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float) -> Tensor:
        """Attend from one generated token of each sequence, and evict at most one entry of each head."""
        policy, layer, rows = self.policy, self.cache.layer(layer_index), batch.row_index
        if layer_index == 0:
            room = self.cache.block_tables.shape[-1] * self.cache.block_size
            # a recorded step cannot ask; no head exceeds its budget, but a layer's may be far above its equal share
            most = room if policy.adapts_layers else policy.budget.entries(room)
            longest = int(self.cache.lengths[:, rows].max()) if batch.is_known else most
            self._longest = min(longest + 1, room)
            self._limits = self._limits_of(batch)
        wanted = {"return_scores": policy.needs_last_attention, "num_scores": self.whole_pages(self._longest)}
        attended = self.attend_once(layer_index, batch, query, scaling, **wanted)
        entries = self._entries(layer_index, rows, batch.tokens_seen, self._longest)
        if policy.needs_last_attention:
            attended, scores = attended
            entries.last_attention = self.backend.add_attention(layer, rows, scores, self._powers, self._longest)
        limits = self._limits[layer_index]
        slots = self.backend.eviction_candidate(
            entries.guarded(policy.scores(entries, limits)), entries.positions, entries.lengths, limits
        )
        if policy.merges:
            rewrite(layer, rows, policy.merge(entries, entries.slots == slots[..., None], limits))
        self._remember(entries, rows)
        self.backend.evict(layer, rows, slots)
        return attended

    def _limits_of(self, batch: ForwardBatch) -> Tensor:
        """Return the number of entries that each head may hold after this generated token, [L, S]."""
        if self.policy.grows:
            limits = entries_allowed(self.policy.budget, batch.tokens_seen).expand(self.cache.layout.num_layers, -1)
        else:
            limits = self.cache.fields["limits"][:, batch.row_index].long()
        is_filler: Any = batch.row_index == self.cache.scratch_row  # which keeps its block
        return limits if batch.is_known else limits.masked_fill(is_filler, torch.iinfo(torch.int64).max)

    def _end_prompt(self, layer_index: int, batch: ForwardBatch, index: int, scaling: float) -> None:
        """Compress a layer whose prompt has ended, together with earlier ones if the policy weights layers."""
        policy, num_layers = self.policy, self.cache.layout.num_layers
        row, tokens_seen = batch.rows[index], batch.ends[index]
        state, limit = self._prompts.pop((layer_index, row)), self._set_limit(layer_index, row, tokens_seen)
        if tokens_seen <= limit and not policy.protect:
            return
        layer, rows = self.cache.layer(layer_index), batch.row_index[index : index + 1]
        held = self._held(layer_index, row, tokens_seen)
        if (length := max(held[layer_index])) == 0:  # delayed gates hold back all tokens
            return
        entries = self._entries(layer_index, rows, batch.tokens_seen[index : index + 1], length)
        if tokens_seen <= limit:
            self._protector.protect(layer, entries, row, limit)
            return
        if (window := state.window) is not None:
            slots = (entries.lengths[..., None] + torch.arange(1 - window.shape[1], 1, device=rows.device)).clamp_min(1)
            (entries.window_attention,) = attention_probabilities(window[None], layer, rows, slots, scaling, length)
            entries.last_attention = entries.window_attention[..., -1, :].mean(2)
        seen = self._seen[row]
        if state.received is not None:
            entries.prompt_attention = state.received[None, ..., :length]  # as wide as the pass's longest prompt
        entries.gathered, entries.limit, entries.tokens = state.gathered, limit, self.tokens[row][:tokens_seen]
        entries.observed = policy.observe(entries, limit)
        weight = policy.layer_weight(entries, limit) if policy.adapts_layers else None
        seen.append(SeenLayer(weight, entries.observed))
        self._remember(entries, rows)
        if not policy.adapts_layers:
            budgets = policy.layer_budgets([1.0] * num_layers, limit, num_layers, tokens_seen)
            if self.cache.layout.compression is None or min(budgets) < max(budgets):
                budgets = within(budgets, mean_held(held))  # equal budgets are not for layers that gates left small
            self._protector.protect(layer, entries, row, budgets[layer_index])
            self._compress(entries, rows, budgets[layer_index], seen[-1])
        elif policy.recompresses or layer_index == num_layers - 1:
            weights, held = self._read_weights(row, seen, held)
            budgets = policy.layer_budgets(weights, limit, num_layers, tokens_seen)
            for earlier_index, budget in enumerate(within(budgets, mean_held(held[: len(seen)]))):
                earlier = self._entries(earlier_index, rows, entries.tokens_seen, max(held[earlier_index]))
                earlier.limit = limit
                self._protector.protect(self.cache.layer(earlier_index), earlier, row, budget)
                self._compress(earlier, rows, budget, seen[earlier_index])
        if layer_index == num_layers - 1:
            del self._seen[row]

    def _set_limit(self, layer_index: int, row: int, tokens_seen: int) -> int:
        limit = max(1, self.policy.budget.entries(tokens_seen) - self.cache.layout.delay)  # delayed tokens count
        for name in ("limits", "nominal"):
            self.cache.fields[name][layer_index, row].fill_(limit)
        return limit

    def _held(self, layer_index: int, row: int, tokens_seen: int) -> list[list[int]]:
        """Return the entries of each layer's heads before eviction, an upper bound in those yet to append."""
        num_new = tokens_seen - int(self.cache.tokens_seen[row])
        if self._has_positions:  # else gates decide
            return [[length + num_new for length in heads] for heads in self._lengths[row]]
        lengths: list[list[int]] = self.cache.lengths[:, row].tolist()
        later = [[length + num_new for length in heads] for heads in lengths[layer_index + 1 :]]
        return lengths[: layer_index + 1] + later

    def _read_weights(self, row: int, seen: list[SeenLayer], held: list[list[int]]) -> tuple[list[float], Any]:
        """Read the layers' weights, and what heads hold if layers have been compressed since `held`, in one wait."""
        weights, num_heads = torch.stack([layer.weight for layer in seen if layer.weight is not None]), len(held[0])
        if not self.policy.recompresses:
            return weights.tolist(), held
        numbers = torch.cat((weights, self.cache.lengths[:, row].flatten().double())).tolist()
        begins = range(len(seen), len(numbers), num_heads)
        return numbers[: len(seen)], [[int(length) for length in numbers[i : i + num_heads]] for i in begins]

    def _compress(self, entries: Entries, rows: Tensor, budget: int, seen: SeenLayer) -> None:
        """Compress a layer of one sequence to its budget."""
        self.cache.fields["limits"][entries.layer_index, rows] = budget
        if budget >= entries.num_entries:
            return
        entries.observed = None if seen.observed is None else seen.observed[..., : entries.num_entries]
        layer, keep = self.cache.layer(entries.layer_index), self.policy.keep(entries, budget) & entries.exists
        if self.policy.merges:
            rewrite(layer, rows, self.policy.merge(entries, entries.exists & ~keep, budget))
        self._remember(entries, rows)
        if entries.observed is not None and self.policy.recompresses:
            moved = (~keep).byte().argsort(dim=-1, stable=True)  # as `compact` moves entries
            seen.observed = entries.observed.masked_fill(~keep, -torch.inf).gather(-1, moved)
        self.backend.compact(layer, rows, keep)

    def _remember(self, entries: Entries, rows: Tensor) -> None:
        if entries.memory.numel() > 0:
            self.cache.fields["memory"][entries.layer_index, rows] = entries.memory

    def _entries(self, layer_index: int, rows: Tensor, tokens_seen: Tensor, num_entries: int) -> Entries:
        layer, fields, sums = self.cache.layer(layer_index), self.cache.fields, self.policy.sums
        lengths = layer.lengths[rows].long()

        def gather(pages: Tensor, scales: Tensor | None) -> Tensor:
            return gather_pages(pages, layer.block_tables[rows], num_entries, scales)

        def read_positions() -> Tensor:
            if self._has_positions:
                return self.backend.read_metadata(layer, rows, ["position"], num_entries)[0]  # type: ignore[no-any-return]
            slots = torch.arange(num_entries, dtype=torch.int32, device=rows.device)
            return slots.where(slots < lengths[..., None], -1)

        positions, protected = split_positions(read_positions()) if self.policy.protect else (None, None)
        return Entries(
            layer_index=layer_index,
            num_layers=self.cache.layout.num_layers,
            lengths=lengths,
            num_entries=num_entries,
            tokens_seen=tokens_seen,
            memory=fields["memory"][layer_index, rows] if "memory" in fields else torch.empty(0),
            nominal=fields["nominal"][layer_index, rows].long(),
            read_positions=read_positions if positions is None else lambda: positions,
            attention_sinks=layer.sinks,
            protected=protected,
            read_sums=lambda: dict(zip(sums, self.backend.read_metadata(layer, rows, sums, num_entries), strict=True)),
            read_keys=lambda: gather(layer.key_pages, layer.key_scales),
            read_values=lambda: gather(layer.value_pages, layer.value_scales),
            rotate=lambda keys, positions: self._rotary.turn_keys(layer_index, keys, positions),
            rotate_queries=lambda queries, positions: self._rotary.turn_queries(layer_index, queries, positions),
            nth_newest=self.backend.nth_newest,
        )


class EvictionPolicy(EvictionMethod):
    """An eviction method on the pages: what `h2o.py` and its siblings derive from."""

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> Eviction:
        return Eviction(cache, backend, self, rotary)
