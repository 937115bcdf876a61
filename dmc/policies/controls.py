"""Controls: a random choice, and a rule that knows which tokens will be asked for."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dmc.budget import Budget
from dmc.config.settings import NonNegative, checked_dataclass
from dmc.kernels.batch import on_device
from dmc.policies.base import Entries
from dmc.policies.eviction import EvictionPolicy


@checked_dataclass(frozen=True, kw_only=True)
class Random(EvictionPolicy):
    """Keep random entries of a prompt, drawn for each head."""

    budget: Budget
    seed: int = 0
    """Seed of the draws, which depend on layer, head and position alone."""

    evicts_decoding: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Uniform on [0, 1); see `EvictionPolicy.scores`."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + entries.layer_index) % 2**63)
        lots = torch.rand(len(entries.tokens), entries.shape[1], generator=generator).T
        return on_device(lots, entries.lengths.device)[None].gather(-1, entries.positions.clamp_min(0).long())


@checked_dataclass(frozen=True, kw_only=True)
class Marked(EvictionPolicy):
    """Keep the prompt tokens at given distances after a marker, and fill the budget with the last tokens.

    If more tokens are marked than the budget holds, the last of them stay. A subclass may mark by another rule.
    """

    budget: Budget
    markers: tuple[NonNegative, ...] = ()
    """Token ids of the markers."""
    behind: tuple[NonNegative, ...] = (2,)
    """Distances after a marker; 0 is the marker itself."""

    evicts_decoding: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    @property
    def serves_compressed(self) -> bool:
        """See `CachePolicy`: merged tokens have no id."""
        return False

    def marked(self, tokens: Tensor) -> Tensor:
        """Return which tokens, int64 [n], are marked, bool [n]."""
        is_marker = torch.isin(tokens, torch.tensor(list(self.markers), dtype=torch.long, device=tokens.device))
        marks = torch.zeros_like(is_marker)
        for distance in self.behind:
            marks[distance:] |= is_marker[: max(0, len(tokens) - distance)]
        return marks

    def scores(self, entries: Entries, budget: int | Tensor) -> Tensor:
        """Positions, with those of marked tokens above all others; see `EvictionPolicy.scores`."""
        marks = on_device(self.marked(torch.tensor(entries.tokens)), entries.lengths.device)
        return entries.positions.float() + len(marks) * marks[entries.positions.clamp_min(0).long()]
