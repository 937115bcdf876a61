"""Tokens on their way through the cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Sequence:
    """A growing list of tokens; what is fed lies in the cache, at `row`, until the blocks are taken back."""

    tokens: list[int]
    """Prompts and continuations so far."""
    wanted: int
    """First position whose logits are still of interest."""
    kept: bool = False
    """Stays in the cache when it has nothing to feed, for a session's next turn."""
    row: int | None = None
    """Place in the cache; None: nothing is cached."""
    num_fed: int = 0
    """Leading tokens that are cached."""
    num_preemptions: int = 0
    """Times the cache was lost to others since the last turn ended."""

    @property
    def num_waiting(self) -> int:
        """Tokens that are known but not yet fed."""
        return len(self.tokens) - self.num_fed
