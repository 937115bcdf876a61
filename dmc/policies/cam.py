"""CaM (Cache Merging, ICML 2024, https://openreview.net/forum?id=LCTmppB165): evicted values live on in later ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dmc.config.settings import Count, checked_dataclass
from dmc.policies.base import Entries, Rewrite
from dmc.policies.h2o import H2O
from dmc.policies.merging import Followers


@checked_dataclass(frozen=True, kw_only=True)
class CaM(H2O):
    """Evict as H2O does, and add an evicted value to the m entries kept right after it: v_j += M v_i / m.

    M is drawn with probability clamp(S_i / mean of S over those m entries, 0, 1), S the accumulated attention. Differs
    from kvpress: S counts the prompt's queries; and from the paper's code, which spreads values before it evicts.
    """

    m: Count = 32
    """Maximum number of entries that share an evicted value."""
    expectation: bool = False
    """Whether the value is scaled by the probability instead of being added by a draw."""
    seed: int = 0
    """Seed of the draws, each of which depends on the token's position alone."""

    merges: ClassVar[bool] = True  # type: ignore[misc]

    def merge(self, entries: Entries, leaving: Tensor, budget: int | Tensor) -> Rewrite | None:
        """Spread the values of evicted entries; see `EvictionPolicy.merge`."""
        followers = Followers(entries.exists & ~leaving, entries.positions, self.m)
        mass = entries.sums["mass"]
        chance = (mass / followers.mean(mass)).clamp(0, 1)
        share = chance if self.expectation else (self._draw(entries) < chance).float()
        value = entries.read_values().float()
        received, concerned = followers.spread(value * (share * leaving)[..., None])
        order = followers.order
        value = value.gather(2, order[..., None].expand_as(value)) + received
        return Rewrite(order.where(concerned, -1), key=None, value=value)

    def _draw(self, entries: Entries) -> Tensor:
        """Draw numbers in [0, 1) by hashing (splitmix64), independent of batches and restarts, [S, H, N]."""
        heads = torch.arange(entries.positions.shape[1], device=entries.positions.device)[:, None]
        state = (entries.positions.long() * entries.num_layers + entries.layer_index) * len(heads) + heads
        state = (state + self.seed * 1_000_003 + 1) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return ((state >> 11) & ((1 << 53) - 1)).double().mul(2.0**-53).float()
