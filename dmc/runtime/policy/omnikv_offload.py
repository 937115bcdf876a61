"""OmniKV in two pools: prompts of sparse layers lie in the host's memory, what is chosen of them in pages."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmc.kernels.base import NewTokens, Seen
from dmc.policies.omnikv import OmniKV
from dmc.runtime.cache_attention import Group, Place
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.policy.omnikv import OmniKVAttention
from dmc.runtime.policy.omnikv_prefill import Pages
from dmc.runtime.policy.omnikv_store import OffloadedStore
from dmc.runtime.policy.reading import gather_slots
from dmc.runtime.policy.slow_pool import Arrival


@dataclass
class Load:
    """What a filter layer has sent for."""

    arrival: Arrival
    """[tokens, layers, H, 2, D]."""
    member: Tensor
    """Which sequence of the group each token belongs to, int64 [tokens]."""
    slot: Tensor
    """Where it shall lie among the sequence's slots, int64 [tokens]."""


class OffloadedOmniKV(OmniKVAttention):
    """Reads the same as `OmniKVAttention`, from a fast pool that holds only what is read.

    A filter layer sends for the chosen tokens of all layers up to the next one; the layer after it hides the copy.
    """

    def __init__(self, cache: PagedCache, backend: ModuleType, policy: OmniKV) -> None:
        super().__init__(cache, backend, policy)
        assert isinstance(cache.notes, OffloadedStore)
        self._offloaded = cache.notes
        self._loads: dict[int, Load] = {}  # by the first layer that waits for it

    def choose(self, layer_index: int, group: Group, query: Tensor, scaling: float) -> Tensor:
        """See `OmniKVAttention.choose`; sends for what is new in the choice."""
        attended = super().choose(layer_index, group, query, scaling)
        assert self._choice is not None
        positions = self._choice.positions.cpu()
        is_new = [True] * len(positions) if self._choice.is_new is None else self._choice.is_new.tolist()
        members = [i for i, new in enumerate(is_new) if new]
        self._loads.pop(self._runs[layer_index][0], None)  # an interrupted pass may have left one
        if members:
            counts = [self.policy.num_chosen(group.places[i].prompt_end) for i in members]
            chosen = [positions[i, :count] for i, count in zip(members, counts, strict=True)]
            self._loads[self._runs[layer_index][0]] = Load(
                self._offloaded.pool.fetch(layer_index, [group.places[i].row for i in members], chosen),
                torch.tensor(members).repeat_interleave(torch.tensor(counts)).to(query.device),
                torch.cat([torch.arange(count) for count in counts]).to(query.device),
            )
        return attended

    def read_choice(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `OmniKVAttention.read_choice`: everything in pages."""
        seen = self.append(layer_index, tokens)
        if (load := self._loads.pop(layer_index, None)) is not None:
            self._unpack(layer_index, group, load)
        return self.attend_to_all(layer_index, group, query, seen, scaling)

    def _unpack(self, first_layer: int, group: Group, load: Load) -> None:
        """Write what has arrived into the pages of all layers of a run."""
        packed, cache = load.arrival.on_device(), self.cache
        tables = cache.block_tables[first_layer : first_layer + packed.shape[1], group.rows]
        blocks = tables[:, load.member, :, load.slot // cache.block_size].long()  # [tokens, layers, H]
        slots = blocks * cache.block_size + (load.slot % cache.block_size)[:, None, None]
        cache.key_pages.view(-1, cache.layout.head_dim)[slots] = packed[..., 0, :]
        cache.value_pages.view(-1, cache.layout.head_dim)[slots] = packed[..., 1, :]

    def read_prompt(self, layer_index: int, group: Group, query: Tensor, tokens: NewTokens, scaling: float) -> Tensor:
        """See `OmniKVAttention.read_prompt`: keys and values of one sequence and layer at a time pass through."""
        attended = []
        for i, place in enumerate(group.places):
            key, value = self._offload(layer_index, group.rows[i : i + 1], place, tokens.key[i], tokens.value[i])
            pages, own = self._as_pages(key, value), query[i : i + 1]
            if self._prefill is not None:
                attended.append(self._prefill.attend(pages, [place], own, scaling))
                continue
            slots = torch.arange(place.begin + 1, place.begin + 1 + own.shape[2], device=own.device)
            seen = Seen(slots.expand(1, len(key), -1))
            attended.append(self.backend.prefill_attention(own, *pages, seen, scaling))
        return torch.cat(attended)

    def _offload(
        self, layer_index: int, rows: Tensor, place: Place, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send new tokens [H, n, D] to the slow pool, behind generated ones that lie in pages; return all there are."""
        store, layer, row = self._offloaded, self.cache.layer(layer_index), place.row
        offloaded, room = int(store.offloaded[layer_index, row]), int(store.room[layer_index, row])
        generated = torch.arange(room, room + place.begin - offloaded, device=rows.device)
        table = layer.block_tables[rows]
        new_key = torch.cat((gather_slots(layer.key_pages, table, generated[None, None])[0], key), dim=1)
        new_value = torch.cat((gather_slots(layer.value_pages, table, generated[None, None])[0], value), dim=1)
        old_key, old_value = store.pool.read(layer_index, row, offloaded)
        store.pool.write(layer_index, row, offloaded, new_key, new_value)
        store.offloaded[layer_index, row] = offloaded + new_key.shape[1]
        held = room + len(generated)
        # one more slot for each new token at most: the pass has made sure of those
        wanted = min(held + key.shape[1], self.policy.num_chosen(place.prompt_end))
        self._resize(layer_index, rows, held, wanted)
        store.room[layer_index, row] = wanted
        return torch.cat((old_key, new_key), dim=1), torch.cat((old_value, new_value), dim=1)

    def _resize(self, layer_index: int, rows: Tensor, held: int, wanted: int) -> None:
        """Give a layer of one sequence so many slots; what they hold does not matter."""
        layer, layout = self.cache.layer(layer_index), self.cache.layout
        if wanted > held:
            shape = (1, layout.num_kv_heads, wanted - held, layout.head_dim)
            nothing = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
            positions = torch.arange(held, wanted, device=layout.device)[None]
            self.append(layer_index, NewTokens(rows, positions, nothing, nothing))
        elif wanted < held:
            capacity = layer.block_tables.shape[-1] * layer.block_size
            keep = torch.arange(capacity, device=layout.device) < wanted
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
