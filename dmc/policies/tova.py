"""Token Omission Via Attention (TOVA, arXiv:2401.06104): the entries that the last query attends to."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dmc.budget import Budget
from dmc.config.settings import checked_dataclass
from dmc.policies.base import Entries
from dmc.policies.eviction import EvictionPolicy


@checked_dataclass(frozen=True, kw_only=True)
class TOVA(EvictionPolicy):
    """Keep the entries that the newest query attends to most; the newest entry itself may be evicted.

    Entry i has the score A_t[i], the attention of the newest query t. All heads of a layer keep the same tokens, by the
    mean over all query heads, as in the authors' code.
    """

    budget: Budget
    per_head: bool = False
    """Whether each KV head keeps its own set, by the mean over its group."""
    protect_last: bool = False
    """Whether the newest entry always stays."""

    window: ClassVar[int] = 1  # type: ignore[misc]
    needs_last_attention: ClassVar[bool] = True

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Attention of the newest query; see `EvictionPolicy.scores`."""
        assert entries.last_attention is not None
        scores = (
            entries.last_attention
            if self.per_head
            else entries.last_attention.mean(1, keepdim=True).expand_as(entries.last_attention)
        )
        return scores.masked_fill(entries.among_last(1), torch.inf) if self.protect_last else scores
