"""KVpop (arXiv:2607.05061): the entries that a learned recurrent scorer rates highest as they leave the window."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dmc.budget import Budget
from dmc.config.settings import checked_dataclass
from dmc.kernels.batch import ForwardBatch
from dmc.kernels.pages import places
from dmc.policies.base import Entries, Sum
from dmc.policies.delayed_scorer import DelayedScorer
from dmc.policies.eviction import Eviction, EvictionPolicy
from dmc.policies.layer_attention import Cache, Rotary


@checked_dataclass(frozen=True, kw_only=True)
class KVpop(EvictionPolicy):
    """Keep the last `window` entries of every head, and of the others those with the highest scores.

    A token is scored once, when it leaves the window, by a `DelayedScorer` that `dmc fit-scorer` has fitted to
    the attention that later queries pay. The scorer's state of a sequence is part of the cache. Differs from the paper:
    a prompt's own queries see all of it, as with all methods here; a budget may be a ratio, which grows.
    """

    budget: Budget
    scorer: str | None = None
    """File of the scorer, fitted to the model that is served."""

    sums: ClassVar[tuple[Sum, ...]] = ("score",)

    @property
    @override
    def files(self) -> tuple[Path, ...]:
        if self.scorer is None:
            raise ValueError("KVpop needs scorer=FILE, which dmc fit-scorer writes for the model")
        return (Path(self.scorer),)

    @property
    def serves_compressed(self) -> bool:
        """See `CachePolicy`: the scorer reads every token."""
        return False

    @property
    @override
    def rotates(self) -> bool:
        return True

    @property
    @override
    def decodes_on_device(self) -> bool:
        return False

    @cached_property
    def _scorer(self) -> DelayedScorer:
        return DelayedScorer.load(*self.files)

    @override
    def fitted(self, num_layers: int, block_size: int) -> KVpop:
        if num_layers != (expected := self._scorer.num_layers):
            raise ValueError(f"scorer={self.scorer} is of {expected} layers, the model has {num_layers}: fit one to it")
        return self

    def memory_size(self, num_kv_heads: int, head_dim: int) -> int:
        """See `EvictionPolicy`: each head's state, and the number of tokens read.

        Raises:
            ValueError: the scorer is of other heads.
        """
        if (heads := self._scorer.head_numbers) != (num_kv_heads, head_dim):
            raise ValueError(
                f"scorer={self.scorer} is of {heads[0]} KV heads of {heads[1]} channels, "
                f"the model has {num_kv_heads} of {head_dim}"
            )
        return num_kv_heads * self._scorer.state_numbers + 1

    @override
    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> Following:
        return Following(cache, backend, self, rotary)

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Learned scores; +inf in the window; see `EvictionPolicy.scores`."""
        window = self._scorer.config.window
        recent = budget.clamp_max(window) if isinstance(budget, Tensor) else min(budget, window)
        return entries.sums["score"].masked_fill(entries.among_last(recent), torch.inf)

    def read_new(self, entries: Entries) -> Tensor:
        """Read the tokens that are new to a layer, of each sequence as many, and move the states in `memory` on.

        Returns:
            What the field `score` gains: the scores of the tokens that leave the window meanwhile, float32 [S, H, N].
        """
        memory, heads = entries.memory.nan_to_num(0.0), entries.shape[1]
        num_read, length = memory[:, -1].long(), int(entries.tokens_seen.max())
        num_new = int((entries.tokens_seen - num_read).max())
        arriving = num_read[:, None] + torch.arange(num_new, device=memory.device)  # positions, [S, n]
        slots = entries.slots.expand(entries.shape)
        # the slot of each position, -1 where it is not held; one column more for slots without an entry
        at = torch.full((*entries.shape[:2], length + 1), -1, device=memory.device, dtype=torch.long)
        at.scatter_(-1, entries.positions.long().where(entries.exists, length), slots)[..., length] = -1
        states = torch.cat((entries.read_keys().float(), entries.read_values().float()), dim=-1)

        def inputs(positions: Tensor) -> tuple[Tensor, Tensor]:
            place = at.gather(-1, positions.where(positions >= 0, length)[:, None].expand(-1, heads, -1))
            found = states.gather(2, place.clamp_min(0)[..., None].expand(*place.shape, states.shape[-1]))
            key, value = found.chunk(2, dim=-1)
            return torch.cat((entries.rotate(key, -positions.clamp_min(0)), value), dim=-1), place

        scorer = self._scorer.to(memory.device)
        (new, _), (old, place) = inputs(arriving), inputs(arriving - scorer.config.window)
        state = memory[:, :-1].unflatten(-1, (heads, -1))
        scores, state = scorer.read(entries.layer_index, state, new, old)
        entries.memory[:] = torch.cat((state.flatten(1), entries.tokens_seen[:, None].float()), dim=-1)
        gained = torch.zeros(*entries.shape[:2], entries.num_entries + 1, device=memory.device)
        gained.scatter_(-1, place.where(place >= 0, entries.num_entries), scores)
        return gained[..., :-1]


class Following(Eviction):
    """Lets the scorer read new tokens before entries are evicted."""

    policy: KVpop

    @override
    def _end_prompt(self, layer_index: int, batch: ForwardBatch, index: int, scaling: float) -> None:
        longest = max(self._held(layer_index, batch.rows[index], batch.ends[index])[layer_index])
        self._follow(layer_index, batch.row_index[index : index + 1], batch.tokens_seen[index : index + 1], longest)
        super()._end_prompt(layer_index, batch, index, scaling)

    @override
    def _decode(self, layer_index: int, batch: ForwardBatch, query: Tensor, scaling: float) -> Tensor:
        rows = batch.row_index
        self._follow(layer_index, rows, batch.tokens_seen, int(self.cache.lengths[layer_index, rows].max()))
        return super()._decode(layer_index, batch, query, scaling)

    def _follow(self, layer_index: int, rows: Tensor, tokens_seen: Tensor, num_entries: int) -> None:
        layer, entries = self.cache.layer(layer_index), self._entries(layer_index, rows, tokens_seen, num_entries)
        gained = self.policy.read_new(entries)
        place = places(layer.block_tables[rows], entries.slots[None, None], layer.block_size)
        layer.entry_metadata["score"].view(-1).index_put_((place,), gained, accumulate=True)
        self._remember(entries, rows)
