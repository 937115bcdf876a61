"""A sequence's cache at some point, from which others go on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, full_like


@dataclass(eq=False)
class Snapshot:
    """What a sequence held at some point: it holds the blocks too, those that the sequence writes on as copies."""

    tokens_seen: int
    states: dict[str, Tensor]
    """Its row, block table and lengths included, [layers, ...] each."""

    def first(self, num_tokens: int) -> Snapshot:
        """Return what was held after so many tokens: all, or those of whole blocks of a full cache."""
        if num_tokens == self.tokens_seen:
            return self
        lengths = full_like(self.states["lengths"], num_tokens)
        return Snapshot(num_tokens, {**self.states, "lengths": lengths})

    @property
    def num_bytes(self) -> int:
        """Beside its blocks."""
        return sum(state.numel() * state.element_size() for state in self.states.values())
