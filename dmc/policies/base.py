"""Interface of a policy: what it sees of the cache, what it returns, and the fields that it keeps there.

To add a method, write a frozen dataclass in a file of its own; `tova.py` is a short one to copy.

- One that evicts extends `EvictionPolicy` (eviction_method.py): class variables say which inputs it needs, and
  `scores` ranks the `Entries` below. Override `layer_budgets`, `keep` or `merge` if layers, heads or evicted entries
  are special.
- One that keeps everything and reads less extends `ReadingPolicy` (reading.py) and returns an attention of its own from
  `attention`; `quest.py` is the shortest.
- State that must follow an entry, block or sequence is declared in `fields`.

Then name it in `__init__.py` and add `configs/policy/<name>.yaml`: the tests of all policies include it.

Shapes beyond the legend of `dmc.compression.base`: S sequences, N entries of the longest head, w queries of the
observation window. Entries are in no order: each has a slot, and a position that tells its age. A *limit* or *budget*
is in entries per KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from dmc.budget import Budget
from dmc.kernels.layout import CacheLayout, Field
from dmc.kernels.pages import slots_below
from dmc.kernels.reference import nth_newest
from dmc.policies.layer_attention import Cache, CacheAttention, Rotary

Sum = Literal["mass", "squares", "value_norm", "score"]
"""Per entry and KV head. mass: attention received from all queries so far, mean over the group; squares: the sum of its
squares; value_norm: the L1 norm of the value; score: what a policy gave it."""


@dataclass
class Entries:
    """Entries that one layer holds of S sequences when a policy decides; at the end of a prompt S = 1."""

    layer_index: int
    num_layers: int
    lengths: Tensor
    """Number of entries, int64 [S, H]."""
    num_entries: int
    """Entries of the longest head, N."""
    tokens_seen: Tensor
    """Tokens of each sequence so far, the newest included, int64 [S]."""
    memory: Tensor
    """The policy's own numbers for this layer and these sequences, NaN at first, float32 [S, K]; written in place."""
    read_positions: Callable[[], Tensor]
    """Returns a copy of the positions, see `positions`."""
    read_sums: Callable[[], dict[Sum, Tensor]]
    """Returns a copy of the sums, see `sums`."""
    read_keys: Callable[[], Tensor]
    """Returns a copy of the keys, rotated at their positions, [S, H, N, D]."""
    read_values: Callable[[], Tensor]
    """Returns a copy of the values, [S, H, N, D]."""
    rotate: Callable[[Tensor, Tensor], Tensor]
    """Turns keys [S, H, n, D] by the layer's RoPE over additional positions, int64 [S, n], of policies that declare
    `rotates`."""
    rotate_queries: Callable[[Tensor, Tensor], Tensor]
    """Turns queries [S, H_q, n, D] likewise."""
    nominal: Tensor
    """Budget at the end of the last prompt, entries per head, int64 [S]."""
    tokens: Sequence[int] = ()
    """At the end of a prompt: the ids of the tokens seen, on the host."""
    limit: int = 0
    """The same at the end of a prompt, when S = 1, on the host."""
    last_attention: Tensor | None = None
    """Attention of the newest query, mean over the group, float32 [S, H, N]."""
    window_attention: Tensor | None = None
    """At the end of a prompt: attention of its last w queries, float32 [S, H, group, w, N]."""
    prompt_attention: Tensor | None = None
    """At the end of a prompt: attention received from all of its queries, float32 [S, H, group, N]."""
    gathered: Any = None
    """At the end of a prompt: what the policy's `gather` returned for its queries."""
    observed: Tensor | None = None
    """What the policy's `observe` returned when the prompt ended, [S, H, N]."""
    attention_sinks: Tensor | None = None
    """Logit of each query head that its softmax counts beside the entries', [H_q]; None: there are none."""
    protected: Tensor | None = None
    """Whether an entry stays whatever its score is, bool [S, H, N]; None: none does."""
    nth_newest: Callable[[Tensor, Tensor], Tensor] = nth_newest
    """The backend's kernel of that name."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of scores: S, H, N."""
        sequences, heads = self.lengths.shape
        return sequences, heads, self.num_entries

    @cached_property
    def positions(self) -> Tensor:
        """Position of each entry's token in its sequence, int32 [S, H, N]; -1 beyond the length."""
        return self.read_positions()

    @cached_property
    def sums(self) -> dict[Sum, Tensor]:
        """Running sums that the policy asked for, float32 [S, H, N]."""
        return self.read_sums()

    @cached_property
    def slots(self) -> Tensor:
        """Index of each slot, int64 [N]."""
        return torch.arange(self.num_entries, device=self.lengths.device)

    @cached_property
    def exists(self) -> Tensor:
        """Whether a slot holds an entry, bool [S, H, N]."""
        return slots_below(self.lengths, self.num_entries)

    @cached_property
    def num_queries(self) -> Tensor:
        """Number of queries that have seen each entry, int64 [S, H, N]."""
        return (self.tokens_seen[:, None, None] - self.positions).clamp_min(1)

    @cached_property
    def order(self) -> Tensor:
        """Slots from the oldest entry to the youngest, then those beyond the length, int64 [S, H, N]."""
        return oldest_first(self.exists, self.positions)

    def guarded(self, scores: Tensor) -> Tensor:
        """Raise the scores of protected entries above all others, those at +inf included, [S, H, N]."""
        return scores if self.protected is None else above_all(scores, self.protected)

    def in_order(self, numbers: Tensor) -> Tensor:
        """Reorder numbers of entries, [S, H, N], from the oldest entry to the youngest."""
        return numbers.gather(-1, self.order)

    def by_slot(self, ordered: Tensor) -> Tensor:
        """Undo `in_order`: reorder numbers from the order of age, [S, H, N], to that of the slots."""
        return torch.empty_like(ordered).scatter_(-1, self.order, ordered)

    def among_last(self, count: int | Tensor) -> Tensor:
        """Whether an entry is one of the youngest `count` (number, [S] or [S, H]) of its head, bool [S, H, N]."""
        if isinstance(count, int):
            counts = torch.full_like(self.lengths, count)  # a copy of a number to a GPU would wait for it
        else:
            counts = (count[:, None] if count.dim() == 1 else count).expand_as(self.lengths)
        return self.positions >= self.nth_newest(self.positions, counts)[..., None]

    def among_first(self, count: int | Tensor) -> Tensor:
        """Whether an entry is one of the oldest `count` (number or [S]) of its head, bool [S, H, N]."""
        counts = count if isinstance(count, int) else count[:, None]
        return self.exists & ~self.among_last(self.lengths - counts)


def oldest_first(chosen: Tensor, positions: Tensor) -> Tensor:
    """Return each head's slots, the chosen ones first, oldest first; [S, H, N] -> int64 [S, H, N]."""
    return positions.masked_fill(~chosen, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)


def above_all(scores: Tensor, chosen: Tensor) -> Tensor:
    """Raise the chosen scores to +inf, and lower others that are there to the highest number."""
    return scores.clamp_max(torch.finfo(scores.dtype).max).masked_fill(chosen, torch.inf)


@dataclass
class Rewrite:
    """New keys and values of entries that stay."""

    slots: Tensor
    """Slots of the entries, int64 [S, H, K]; negative: none."""
    key: Tensor | None
    """New keys, [S, H, K, D]; None: keys stay."""
    value: Tensor | None
    """New values, [S, H, K, D]; None: values stay."""


@dataclass
class PromptState:
    """What a layer keeps of the queries of a prompt that has not ended."""

    window: Tensor | None = None
    """The last queries, [H_q, w, D]."""
    received: Tensor | None = None
    """Attention that entries received, [H, group, N]."""
    gathered: Any = None
    """Result of the policy's `gather`."""


@dataclass
class SeenLayer:
    """State of a prompt's layer that waits for its final budget."""

    weight: Tensor | None
    """Result of `EvictionPolicy.layer_weight`."""
    observed: Tensor | None
    """Result of `EvictionPolicy.observe`, [1, H, N]."""


class CachePolicy:
    """A training-free method: it decides which cache entries are kept, or read."""

    budget: Budget

    @property
    def one_by_one(self) -> bool:
        """Whether every generated token needs its own forward pass, because the policy acts on each."""
        return True

    @property
    def decodes_on_device(self) -> bool:
        """Whether feeding a generated token asks the host for nothing, so that the step can be recorded."""
        return False

    @property
    def prompt_chunk(self) -> int | None:
        """Number of prompt tokens that chunked prefill must not split; None: a prompt may be split anywhere."""
        return None

    @property
    def rotates(self) -> bool:
        """Whether it turns queries or keys to other positions, so that it must know how the model does."""
        return False

    @property
    def serves_compressed(self) -> bool:
        """Whether it can further compress the cache of a model with learned gates."""
        return False

    @property
    def serves_8_bit(self) -> bool:
        """Whether it can work on keys and values of 8 bits."""
        return False

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that it reads, whose content is a part of its settings; ValueError: one that it needs is not named."""
        return ()

    @property
    def can_fork(self) -> bool:
        """Whether its whole state of a sequence is in the cache's fields, so that copying them forks the sequence."""
        return True

    @property
    def why_not_copied(self) -> str | None:
        """Why a copy of the cache's fields is not all of a sequence, or None."""
        elsewhere = f"policy={type(self).__name__}: it keeps a part of its state outside the pages; use another"
        return None if self.can_fork else elsewhere

    def check_dtype(self, kv_cache_dtype: str) -> None:
        """Raise a ValueError if the policy cannot work on such pages."""
        if kv_cache_dtype != "auto" and not self.serves_8_bit:
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype!r}: {type(self).__name__} needs entries in the model's dtype; "
                "use kv_cache_dtype='auto', or a policy that only evicts, such as H2O or SnapKV"
            )

    def fitted(self, num_layers: int, block_size: int) -> CachePolicy:
        """Return the policy with options that depend on the model filled in.

        Args:
            num_layers: layers of the model.
            block_size: entries of a page of the cache.
        Raises:
            ValueError: the policy does not fit the model or the pages.
        """
        return self

    def tokenized(self, tokenizer: Any) -> CachePolicy:
        """Return the policy with its texts tokenized; without a tokenizer, with no texts."""
        return self

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """Declare the fields that the cache keeps for the policy beside keys and values."""
        return ()

    def offloaded(self, num_layers: int) -> dict[int, list[int]]:
        """Return the runs of layers whose entries are partly in the host's memory, by name of the run."""
        return {}

    def attention(self, cache: Cache, backend: ModuleType, rotary: Rotary | None) -> CacheAttention:
        """Return the object that appends tokens and attends under this policy.

        Args:
            cache: the engine's cache, with the fields above.
            backend: kernel module.
            rotary: turns queries and keys to other positions; None: the policy does not declare `rotates`.
        """
        return CacheAttention(cache, backend)
