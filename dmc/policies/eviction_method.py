"""What an eviction policy declares and computes; `eviction.py` executes it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dmc.kernels.layout import CacheLayout, Field
from dmc.policies.base import CachePolicy, Entries, Rewrite, Sum
from dmc.policies.budgets import keep_top
from dmc.policies.protection import Protection


class EvictionMethod(Protection, CachePolicy):
    """Keeps the entries with the highest scores: score x layer budget x head budget x fate of evicted entries.

    A method is a frozen dataclass that declares its inputs (the class variables) and overrides `scores`; by default
    layers and heads have equal budgets and evicted entries are lost.
    """

    evicts_decoding: ClassVar[bool] = True
    """Whether it evicts after every generated token; else the cache grows after the prompt."""
    grows: ClassVar[bool] = True
    """Whether a budget given as a ratio grows with the generated tokens; else it is fixed when a prompt ends. Both
    count all tokens seen in all turns of a session, not the entries that earlier turns have left."""
    window: int = 0
    """Number of last queries of a prompt whose attention it needs."""
    needs_prompt_attention: ClassVar[bool] = False
    """Whether it needs, when a prompt ends, the attention of each query head to every entry, summed over queries."""
    needs_last_attention: ClassVar[bool] = False
    """Whether it needs the attention of every generated token's query."""
    merges: bool = False
    """Whether `merge` changes entries that stay."""
    gathers: ClassVar[bool] = False
    """Whether it needs all queries of a prompt before RoPE (`gather`)."""
    sums: ClassVar[tuple[Sum, ...]] = ()
    """Running sums, or the score, of every entry that it needs."""
    adapts_layers: ClassVar[bool] = False
    """Whether layer budgets depend on the prompt (`layer_weight`)."""
    recompresses: bool = False
    """Whether each layer is compressed as soon as it is prefilled, and again as later ones follow (`adapts_layers`)."""

    @property
    @override
    def one_by_one(self) -> bool:
        return self.evicts_decoding

    @property
    @override
    def decodes_on_device(self) -> bool:
        return True

    @property
    def serves_compressed(self) -> bool:
        """See `CachePolicy`: prompts alone, without sums over or bounds of tokens, which gates may have merged."""
        return not self.evicts_decoding and not self.sums and not self.protect

    @property
    def serves_8_bit(self) -> bool:
        """See `CachePolicy`: unless it rewrites entries, which would be rounded every time."""
        return not self.merges

    def memory_size(self, num_kv_heads: int, head_dim: int) -> int:
        """Numbers that the policy keeps for each layer and sequence."""
        return 0

    def fields(self, layout: CacheLayout) -> tuple[Field, ...]:
        """Limits and memory, and each entry's position and sums unless the model merges tokens into slots."""
        size = self.memory_size(layout.num_kv_heads, layout.head_dim)
        kept = [Field("limits", torch.int32, "row"), Field("nominal", torch.int32, "row")]
        kept += [Field("memory", torch.float32, "row", (size,), start=torch.nan)] if size else []
        kept += [Field("position", torch.int32, "slot")] if layout.compression is None else []
        return (*kept, *(Field(name, torch.float32, "slot") for name in self.sums))

    def gather(self, before: Any, query: Tensor, begin: int) -> Any:
        """Accumulate the next queries of a prompt; the last call's result becomes `Entries.gathered`.

        Args:
            before: result of the previous call; None: this is the first.
            query: queries before RoPE, times the factor on the scores, float32 [H_q, n, D].
            begin: position of the first query.
        """
        raise NotImplementedError

    def observe(self, entries: Entries, limit: int) -> Tensor | None:
        """Score `window_attention` when a prompt of more than `limit` tokens ends; the result is `Entries.observed`.

        Returns:
            Float32 [S, H, N], or None.
        """
        return None

    def layer_weight(self, entries: Entries, limit: int) -> Tensor:
        """Return the layer's weight in the division of the total budget, float64 [] (`adapts_layers`)."""
        raise NotImplementedError

    def layer_budgets(self, weights: list[float], limit: int, num_layers: int, tokens_seen: int) -> list[int]:
        """Divide `limit * num_layers` entries per head among the layers seen so far.

        In a later turn a layer may hold fewer entries than its budget: the other layers then get the rest.

        Args:
            weights: weight of each layer seen.
            limit: entries per head, on average.
            num_layers: layers of the model.
            tokens_seen: tokens of all turns, which a layer without eviction would hold.
        """
        return [limit] * len(weights)

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Score entries, float32 [S, H, N]: the highest stay, of equal ones the oldest; +inf always stays.

        Args:
            entries: entries of one layer.
            budget: entries per head that stay, a number or [S].
        """
        raise NotImplementedError

    def keep(self, entries: Entries, budget: int) -> Tensor:
        """Choose the entries that stay when a prompt ends, bool [S, H, N]; default: each head's highest scores."""
        scores = entries.guarded(self.scores(entries, budget)).masked_fill(~entries.exists, -torch.inf)
        return entries.by_slot(keep_top(entries.in_order(scores), budget))

    def merge(self, entries: Entries, leaving: Tensor, budget: int | Tensor) -> Rewrite | None:
        """Change entries that stay before others are evicted; default: nothing changes.

        Args:
            entries: entries of one layer.
            leaving: which are evicted, bool [S, H, N]; of a generated token at most one of each head.
            budget: see `scores`.
        """
        return None
