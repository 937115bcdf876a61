"""What a policy sees of the cache and what it answers; policies hold no storage.

Shapes beyond the legend of `dmc.compression.base`: S sequences, N entries of the longest head, w queries of the
observation window. Entries lie in the order of age: 0 is the oldest. A *limit* or *budget* is in entries per KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dmc.budget import Budget
from dmc.policies.budgets import keep_top

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
    observed: Tensor | None = None
    """What the policy's `observe` answered when the prompt ended, [S, H, N]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of scores: S, H, N."""
        sequences, heads = self.lengths.shape
        return sequences, heads, self.num_entries

    @cached_property
    def positions(self) -> Tensor:
        """Place of each entry's token in its sequence, int64 [S, H, N]; not to be read beyond the length."""
        return self.read_positions()

    @cached_property
    def sums(self) -> dict[Sum, Tensor]:
        """Running sums that the policy asked for, float32 [S, H, N]."""
        return self.read_sums()

    @cached_property
    def ages(self) -> Tensor:
        """0 for the oldest entry, int64 [N]."""
        return torch.arange(self.num_entries, device=self.lengths.device)

    @cached_property
    def exists(self) -> Tensor:
        """False beyond the length, bool [S, H, N]."""
        return self.ages < self.lengths[..., None]

    @cached_property
    def num_queries(self) -> Tensor:
        """Queries that have seen an entry, int64 [S, H, N]."""
        return (self.tokens_seen[:, None, None] - self.positions).clamp_min(1)

    def among_last(self, count: int | Tensor) -> Tensor:
        """Whether an entry is one of the last `count` (number or [S]) that its head holds, bool [S, H, N]."""
        if isinstance(count, Tensor):
            count = count[:, None, None]
        return self.ages >= self.lengths[..., None] - count


@dataclass
class Rewrite:
    """New keys and values of entries that stay."""

    ages: Tensor
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

    def fitted(self, num_layers: int, block_size: int) -> CachePolicy:
        """Return the policy with what depends on the model filled in.

        Args:
            num_layers: of the model.
            block_size: entries of the cache's pages.
        Raises:
            ValueError: it does not fit them.
        """
        return self


class EvictionPolicy(CachePolicy):
    """Keeps the entries with the highest scores: score x layer budget x head budget x what happens to the evicted.

    A method is a frozen dataclass that says what it must see (the class variables) and overrides `scores`; layer
    budgets, head budgets and the fate of the evicted have defaults: the same budget everywhere, and gone.
    """

    evicts_decoding: ClassVar[bool] = True
    """Whether it evicts after every generated token; else the cache grows after the prompt."""
    grows: ClassVar[bool] = True
    """Whether a budget given as a ratio grows with the generated tokens; else it stays what it was when the last prompt
    ended. Both count all tokens seen, those of all turns of a session, not what earlier turns have left."""
    window: int = 0
    """Queries at the end of a prompt whose attention it must see."""
    needs_columns: ClassVar[bool] = False
    """Whether it must see, when a prompt ends, what each query head paid to every entry."""
    needs_row: ClassVar[bool] = False
    """Whether it must see the attention of every generated token's query."""
    merges: bool = False
    """Whether `merge` changes entries that stay."""
    sums: ClassVar[tuple[Sum, ...]] = ()
    """Running sums that it needs of every entry."""
    adapts_layers: ClassVar[bool] = False
    """Whether layer budgets depend on what the layers of this prompt look like (`layer_weight`)."""
    recompresses: bool = False
    """Whether layers are compressed as soon as they are seen, and again when others join; needs `adapts_layers`."""

    @property
    def one_by_one(self) -> bool:
        """See `CachePolicy`."""
        return self.evicts_decoding

    @property
    def serves_compressed(self) -> bool:
        """See `CachePolicy`: prompts alone, and without sums over tokens that the gates may have merged."""
        return not self.evicts_decoding and not self.sums

    def memory_size(self, num_kv_heads: int, head_dim: int) -> int:
        """Numbers that the policy keeps for each layer and sequence."""
        return 0

    def observe(self, entries: Entries, limit: int) -> Tensor | None:
        """Look at `entries.rows` when a prompt of more than `limit` tokens ends; the answer comes back as `observed`.

        Returns:
            Float32 [S, H, N], or None.
        """
        return None

    def layer_weight(self, entries: Entries, limit: int) -> float:
        """Say how much of the total this layer deserves."""
        return 1.0

    def layer_budgets(self, weights: list[float], limit: int, num_layers: int, tokens_seen: int) -> list[int]:
        """Divide `limit * num_layers` entries per head among the layers seen so far.

        Of a later turn a layer may hold fewer entries than this says: others then get what it cannot use.

        Args:
            weights: one for each layer seen.
            limit: entries per head, on average.
            num_layers: of the model.
            tokens_seen: of all turns, as many as a layer would hold if nothing had ever gone.
        """
        return [limit] * len(weights)

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Rank the entries: the highest stay, +inf stays whatever happens; of equal ones the youngest goes.

        Args:
            entries: of one layer.
            budget: entries per head that stay, a number or [S].
        Returns:
            Float32 [S, H, N].
        """
        raise NotImplementedError

    def keep(self, entries: Entries, budget: int) -> Tensor:
        """Choose what stays when a prompt ends, bool [S, H, N]; default: every head its best."""
        return keep_top(self.scores(entries, budget).masked_fill(~entries.exists, -torch.inf), budget)

    def merge(self, entries: Entries, leaving: Tensor) -> Rewrite | None:
        """Change entries that stay before `leaving` (bool [S, H, N], maybe none) go; default: what goes is lost."""
        return None
