"""What a policy sees of the cache and what it answers; what it keeps there it declares as fields.

Shapes beyond the legend of `dmc.compression.base`: S sequences, N entries of the longest head, w queries of the
observation window. Entries lie in no order: each has a slot, and a position that tells its age. A *limit* or *budget*
is in entries per KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from dmc.budget import Budget
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import slots_below
from dmc.kernels.reference import nth_newest
from dmc.policies.attention import Cache, CacheAttention, RotaryTables

Sum = Literal["mass", "squares", "value_norm"]
"""Per entry and KV head: the attention received from all queries so far (mean over the group), the sum of its squares,
and the L1 norm of its value."""


@dataclass
class Entries:
    """What one layer holds of S sequences when a policy decides; while a prompt ends, S = 1."""

    layer_index: int
    num_layers: int
    lengths: Tensor
    """Entries held, int64 [S, H]."""
    num_entries: int
    """N."""
    tokens_seen: Tensor
    """Tokens of each sequence so far, the newest included, int64 [S]."""
    memory: Tensor
    """The policy's own numbers for this layer and these sequences, NaN at first, float32 [S, K]; written in place."""
    read_positions: Callable[[], Tensor]
    """Copies the positions, see `positions`."""
    read_sums: Callable[[], dict[Sum, Tensor]]
    """Copies the sums, see `sums`."""
    read_tokens: Callable[[], Tensor]
    """Copies the first sequence's token ids, int64 [tokens_seen]."""
    read_keys: Callable[[], Tensor]
    """Copies the keys, rotated at their positions, [S, H, N, D]."""
    read_values: Callable[[], Tensor]
    """Copies the values, [S, H, N, D]."""
    rotate: Callable[[Tensor, Tensor], Tensor]
    """Turns keys [S, H, n, D] by RoPE over so many more positions, int64 [S, n]."""
    nominal: Tensor
    """What the budget was for the last prompt, entries per head, int64 [S]."""
    row: Tensor | None = None
    """Attention of the newest query, mean over the group, float32 [S, H, N]."""
    rows: Tensor | None = None
    """At the end of a prompt: attention of its last w queries, float32 [S, H, group, w, N]."""
    columns: Tensor | None = None
    """At the end of a prompt: attention received from all of its queries, float32 [S, H, group, N]."""
    gathered: Any = None
    """At the end of a prompt: what the policy's `gather` made of its queries."""
    observed: Tensor | None = None
    """What the policy's `observe` answered when the prompt ended, [S, H, N]."""
    nth_newest: Callable[[Tensor, Tensor], Tensor] = nth_newest
    """The backend's."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of scores: S, H, N."""
        sequences, heads = self.lengths.shape
        return sequences, heads, self.num_entries

    @cached_property
    def positions(self) -> Tensor:
        """Place of each entry's token in its sequence, int32 [S, H, N]; -1 beyond the length."""
        return self.read_positions()

    @cached_property
    def sums(self) -> dict[Sum, Tensor]:
        """Running sums that the policy asked for, float32 [S, H, N]."""
        return self.read_sums()

    @cached_property
    def slots(self) -> Tensor:
        """Int64 [N]."""
        return torch.arange(self.num_entries, device=self.lengths.device)

    @cached_property
    def exists(self) -> Tensor:
        """False beyond the length, bool [S, H, N]."""
        return slots_below(self.lengths, self.num_entries)

    @cached_property
    def num_queries(self) -> Tensor:
        """Queries that have seen an entry, int64 [S, H, N]."""
        return (self.tokens_seen[:, None, None] - self.positions).clamp_min(1)

    @cached_property
    def order(self) -> Tensor:
        """Slots from the oldest entry to the youngest, then those beyond the length, int64 [S, H, N]."""
        return oldest_first(self.exists, self.positions)

    def in_order(self, numbers: Tensor) -> Tensor:
        """Bring numbers of entries, [S, H, N], into the order of age."""
        return numbers.gather(-1, self.order)

    def by_slot(self, ordered: Tensor) -> Tensor:
        """Bring what lies in the order of age, [S, H, N], back to the slots."""
        return torch.empty_like(ordered).scatter_(-1, self.order, ordered)

    def among_last(self, count: int | Tensor) -> Tensor:
        """Whether an entry is one of the youngest `count` (number, [S] or [S, H]) of its head, bool [S, H, N]."""
        counts = torch.as_tensor(count, device=self.lengths.device)
        counts = counts[:, None] if counts.dim() == 1 else counts
        return self.positions >= self.nth_newest(self.positions, counts.expand_as(self.lengths))[..., None]

    def among_first(self, count: int | Tensor) -> Tensor:
        """Whether an entry is one of the oldest `count` (number or [S]) of its head, bool [S, H, N]."""
        counts = torch.as_tensor(count, device=self.lengths.device).view(-1, 1)
        return self.exists & ~self.among_last(self.lengths - counts)


def oldest_first(chosen: Tensor, positions: Tensor) -> Tensor:
    """Slots of the chosen entries of each head, oldest first, before all others; [S, H, N] -> int64 [S, H, N]."""
    return positions.masked_fill(~chosen, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)


@dataclass
class Rewrite:
    """New keys and values of entries that stay."""

    slots: Tensor
    """Which entries, int64 [S, H, K]; negative: none."""
    key: Tensor | None
    """[S, H, K, D]; None: keys stay."""
    value: Tensor | None
    """[S, H, K, D]; None: values stay."""


class CachePolicy:
    """A training-free method: what it keeps of the cache, or reads of it."""

    budget: Budget

    @property
    def one_by_one(self) -> bool:
        """Whether every generated token must be fed in a pass of its own, for the policy acts on each."""
        return True

    @property
    def prompt_chunk(self) -> int | None:
        """Prompt tokens that the policy takes together: a prompt is cut between them only; None: anywhere."""
        return None

    @property
    def serves_compressed(self) -> bool:
        """Whether it can compress further what a model's own gates leave."""
        return False

    @property
    def can_fork(self) -> bool:
        """Whether all that it keeps of a sequence lies in the cache's fields, so that a copy of them is another one."""
        return True

    def fitted(self, num_layers: int, block_size: int) -> CachePolicy:
        """Return the policy with what depends on the model filled in.

        Args:
            num_layers: of the model.
            block_size: entries of the cache's pages.
        Raises:
            ValueError: it does not fit them.
        """
        return self

    def worded(self, tokenizer: Any) -> CachePolicy:
        """Return the policy with its texts as tokens; without a tokenizer it has none."""
        return self

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """Say what the cache is to keep for the policy beside keys and values."""
        return ()

    def offloaded(self, num_layers: int) -> dict[int, list[int]]:
        """Say of which layers a part lies in the host's memory, in runs by name."""
        return {}

    def attention(self, cache: Cache, backend: ModuleType, rotary: RotaryTables) -> CacheAttention:
        """Return what lets tokens in and attends under this policy.

        Args:
            cache: storage, with the fields above.
            backend: kernel module.
            rotary: with which keys are turned further.
        """
        return CacheAttention(cache, backend)
