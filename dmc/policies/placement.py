"""Where entries lie whose layers read a chosen part of a prompt: all on the device, or the chosen ones alone.

`HostPlacement` copies the chosen tokens of several layers together while the layer before them still computes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmc.kernels.base import NewTokens, VisibleKeys
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.pages import gather_slots, places, small_pages
from dmc.policies.layer_attention import CacheAttention
from dmc.policies.reading import backend_for_pages, with_tail

Pages = tuple[Tensor, Tensor, Tensor]
"""Keys and values, [N, block, D] each, and tables, int32 [rows, H, M]."""


@dataclass
class Choice:
    """Prompt tokens that some layers read of the sequences that decode in this pass."""

    positions: Tensor
    """Positions of the prompt tokens, ascending, int64 [S, k]; arbitrary beyond the count."""
    counts: Tensor
    """Number of chosen tokens, int64 [S]."""
    counts_on_host: list[int]
    """The same."""
    reads: tuple[Tensor, Tensor] | None = None
    """The chosen and all generated tokens, int64 [S, K], and their number, int32 [S, 1]; set by the first reader."""


@dataclass
class PromptPart:
    """Sequences of a batch of prompt tokens that can be attended from together."""

    batch: ForwardBatch
    """Their tokens; the cache rows are those of the tables in `pages`."""
    span: slice
    """Their tokens in the batch."""
    pages: Pages
    """All their keys and values, the new ones included."""
    seen: VisibleKeys


class DevicePlacement:
    """Every entry is in the cache's pages; a choice is read as pages of one entry.

    Args:
        attention: appends to the cache and attends.
    """

    def __init__(self, attention: CacheAttention) -> None:
        self.attention, self.cache = attention, attention.cache
        self._backend = backend_for_pages(attention.backend, self.cache.layout, 1)

    def append_prompt(
        self, layer_index: int, batch: ForwardBatch, tokens: NewTokens, num_chosen: list[int]
    ) -> list[PromptPart]:
        """Append prompt tokens.

        Args:
            layer_index: index of the layer.
            batch: prompt tokens of some sequences.
            tokens: theirs.
            num_chosen: how many tokens of each sequence's prompt a choice has.
        """
        seen, layer = self.attention.append(layer_index, batch, tokens), self.cache.layer(layer_index)
        pages = layer.key_pages, layer.value_pages, layer.block_tables
        return [PromptPart(batch, slice(None), pages, seen)]

    def prepare(self, run: int, layers: list[int], batch: ForwardBatch, choice: Choice) -> None:
        """Take notice of a choice for the layers of a run, before they come."""

    def read(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, choice: Choice, scaling: float
    ) -> Tensor:
        """Append a generated token of each sequence; attend to the chosen and to all generated ones, [S, H_q, D]."""
        self.attention.append(layer_index, batch, tokens)
        if choice.reads is None:
            choice.reads = self._with_generated(batch, choice)
        layer, (positions, lengths) = self.cache.layer(layer_index), choice.reads
        self.cache.num_unread += layer.lengths.shape[1] * (batch.tokens_seen[:, None] - lengths).sum()
        attended: Tensor = self._backend.paged_attention(
            query,
            small_pages(layer.key_pages, 1),
            small_pages(layer.value_pages, 1),
            places(layer.block_tables[batch.row_index], positions[:, None], layer.block_size).int(),
            lengths.expand(-1, layer.lengths.shape[1]),
            scaling,
            sinks=layer.sinks,
        )
        return attended

    def _with_generated(self, batch: ForwardBatch, choice: Choice) -> tuple[Tensor, Tensor]:
        prompt, end = batch.ends_of_prompts, batch.tokens_seen
        most_generated = max(end - prompt for end, prompt in zip(batch.ends, batch.prompt_ends, strict=True))
        width = choice.positions.shape[1] + most_generated
        positions = with_tail(choice.positions, choice.counts, prompt, end, width)
        return positions, (choice.counts + end - prompt).int()[:, None]


@dataclass
class Load:
    """A copy of chosen tokens from the host, under way."""

    copy: Any
    """The `PendingCopy`, [tokens, layers, H, 2, D]."""
    sequence: Tensor
    """Index in the batch of each token's sequence, int64 [tokens]."""
    slot: Tensor
    """Slot of each token in its sequence, int64 [tokens]."""


class HostPlacement:
    """Prompts are in the host's memory (`Cache.slow`); pages hold the chosen tokens, then the generated ones.

    Args:
        attention: appends to the cache and attends.
    """

    def __init__(self, attention: CacheAttention) -> None:
        self.attention, self.cache = attention, attention.cache
        self._loads: dict[int, Load] = {}  # by the first layer of the run

    def append_prompt(
        self, layer_index: int, batch: ForwardBatch, tokens: NewTokens, num_chosen: list[int]
    ) -> list[PromptPart]:
        """See `DevicePlacement`; keys and values of each sequence are copied to pages of their own."""
        parts = []
        for i, span in enumerate(batch.spans):
            sequence, _ = batch.part([i])
            pages = self._append_to_host(layer_index, sequence, tokens.part(span), num_chosen[i])
            seen = VisibleKeys((sequence.positions + 1).int()[:, None].expand(-1, tokens.key.shape[1]))
            parts.append(PromptPart(dataclasses.replace(sequence, rows=[0]), span, pages, seen))
        return parts

    def prepare(self, run: int, layers: list[int], batch: ForwardBatch, choice: Choice) -> None:
        """Start copying the chosen tokens to the device, for all layers of a run."""
        positions, counts = choice.positions.cpu(), choice.counts_on_host
        chosen = [chosen[:count] for chosen, count in zip(positions, counts, strict=True)]
        self._loads[layers[0]] = Load(
            self.cache.slow.fetch(run, batch.rows, chosen),
            torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(batch.device),
            torch.cat([torch.arange(count) for count in counts]).to(batch.device),
        )

    def read(
        self, layer_index: int, batch: ForwardBatch, query: Tensor, tokens: NewTokens, choice: Choice, scaling: float
    ) -> Tensor:
        """See `DevicePlacement`: attends to all that the pages hold."""
        seen = self.attention.append(layer_index, batch, tokens)
        if (load := self._loads.pop(layer_index, None)) is not None:
            self._unpack(layer_index, batch, load)
        self.cache.num_unread += (batch.tokens_seen[:, None] - seen.slots).sum()
        return self.attention.attend_to_all(layer_index, batch, query, seen, scaling)

    def _unpack(self, first_layer: int, batch: ForwardBatch, load: Load) -> None:
        """Write copied tokens into the pages of all layers of a run."""
        packed, cache = load.copy.on_device(), self.cache
        tables = cache.block_tables[first_layer : first_layer + packed.shape[1], batch.row_index]
        slots = load.slot.repeat(len(tables))[:, None, None]
        place = places(tables[:, load.sequence].flatten(0, 1), slots, cache.block_size)
        place = place.view(len(tables), len(load.slot), -1).transpose(0, 1)  # [tokens, layers, H]
        for i, name in enumerate(("key_pages", "value_pages")):
            cache.fields[name].flatten(0, 1)[place] = packed[..., i, :]

    def _append_to_host(self, layer_index: int, batch: ForwardBatch, tokens: NewTokens, num_chosen: int) -> Pages:
        """Copy one sequence's new tokens to the host, behind the generated tokens in its pages; return all of it."""
        (row,), (begin,), rows = batch.rows, batch.begins, batch.row_index
        slow, layer = self.cache.slow, self.cache.layer(layer_index)
        num_offloaded, room = int(slow.tokens[layer_index, row]), int(slow.room[layer_index, row])
        generated = torch.arange(room, room + begin - num_offloaded, device=rows.device)
        table = layer.block_tables[rows]
        key = gather_slots(layer.key_pages, table, generated[None, None])[0]
        value = gather_slots(layer.value_pages, table, generated[None, None])[0]
        key = torch.cat((key, tokens.key.transpose(0, 1)), dim=1)
        value = torch.cat((value, tokens.value.transpose(0, 1)), dim=1)
        old_key, old_value = slow.read(layer_index, row, num_offloaded)
        slow.write(layer_index, row, num_offloaded, key, value)
        held = room + len(generated)
        # at most one more slot for each new token: the pass has reserved them
        wanted = min(held + len(tokens.key), num_chosen)
        self._resize(layer_index, row, held, wanted)
        slow.room[layer_index, row] = wanted
        return self._as_pages(torch.cat((old_key, key), dim=1), torch.cat((old_value, value), dim=1))

    def _resize(self, layer_index: int, row: int, held: int, wanted: int) -> None:
        """Set the number of slots of one sequence in a layer; their content is arbitrary."""
        layer, layout = self.cache.layer(layer_index), self.cache.layout
        if wanted > held:
            shape = (wanted - held, layout.num_kv_heads, layout.head_dim)
            nothing = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
            batch = ForwardBatch([row], [held], [wanted - held], layout.device)
            self.attention.append(layer_index, batch, NewTokens(nothing, nothing))
        elif wanted < held:
            capacity = layer.block_tables.shape[-1] * layer.block_size
            keep = torch.arange(capacity, device=layout.device) < wanted
            rows = torch.tensor([row], device=layout.device)
            self.attention.backend.compact(layer, rows, keep.expand(1, layout.num_kv_heads, -1))

    def _as_pages(self, key: Tensor, value: Tensor) -> Pages:
        """Lay keys and values [H, n, D] out as pages of one sequence."""
        heads, size = key.shape[0], self.cache.block_size
        per_head = -(-key.shape[1] // size)
        beyond = per_head * size - key.shape[1]
        table = torch.arange(heads * per_head, dtype=torch.int32, device=key.device).view(1, heads, per_head)
        key_pages, value_pages = (
            pad(states, (0, 0, 0, beyond)).reshape(-1, size, states.shape[-1]) for states in (key, value)
        )
        return key_pages, value_pages, table
