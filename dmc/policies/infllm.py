"""InfLLM (arXiv:2402.04617): the distant past in blocks, found by representative keys and read without positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dmc.budget import Budget
from dmc.policies.reading import ReadingPolicy


@dataclass(frozen=True, kw_only=True)
class InfLLM(ReadingPolicy):
    """Read the first tokens, the blocks that are most relevant to a chunk of queries, and a local window.

    A chunk is so many tokens of a prompt, or one generated token. A block is complete for a chunk when it is outside
    the window of all of its queries; what is neither in a complete block nor in the window is read as if chosen. All
    that is beyond the window lies at one distance, `local`. While the window and the first tokens, or the budget, hold
    everything, attention is exact.

    Differs from the authors' code: representatives are chosen for each KV head, not for every query head, and short
    contexts are exact, where theirs puts every token beyond the window at one distance. Their setting of 32 blocks is
    a budget of 128 + 4096 + 32 * 128 = 8320 tokens.

    Raises:
        ValueError: an option is out of range.
    """

    budget: Budget
    """Entries that are read: first tokens, window, and whole blocks, at least one; a ratio counts the prompt."""
    block_size: int = 128
    """Tokens of a block."""
    representatives: int = 4
    """Tokens of a block whose mean key stands for it: those with the most attention from the queries around them."""
    initial: int = 128
    """First tokens, which are always read."""
    local: int = 4096
    """Tokens of the window, the newest included."""
    chunk: int = 512
    """Queries of a prompt that read the same blocks."""

    def __post_init__(self) -> None:
        for name in ("block_size", "representatives", "local", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a whole number >= 1")
        if self.initial < 0:
            raise ValueError(f"initial={self.initial}: expected a number of tokens >= 0")
        if self.representatives > self.block_size:
            raise ValueError(f"representatives={self.representatives}: a block has {self.block_size} tokens")

    @property
    def prompt_chunk(self) -> int | None:
        """See `CachePolicy`."""
        return self.chunk

    def num_blocks(self, prompt_length: int) -> int:
        """Blocks that a query reads, if there are as many."""
        return max(1, (self.budget.entries(prompt_length) - self.initial - self.local) // self.block_size)

    def num_complete(self, position: int) -> int:
        """Complete blocks for a chunk that begins at a position."""
        return max(0, position - self.local - self.initial) // self.block_size

    def exact_until(self, prompt_length: int) -> int:
        """Positions before this one read everything."""
        return max(self.initial + self.local, self.budget.entries(prompt_length))


def block_relevance(query: Tensor, representative: Tensor) -> Tensor:
    """Inner product of a chunk's mean query with each block's key, summed over all query heads.

    Args:
        query: [S, H, group, D].
        representative: [S, H, blocks, D].
    Returns:
        [S, blocks].
    """
    return (representative @ query.sum(2)[..., None])[..., 0].sum(1)
