"""Quest (arXiv:2406.10774): a query reads the pages whose bounds promise the highest scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dmc.budget import Budget
from dmc.policies.reading import ReadingPolicy


@dataclass(frozen=True, kw_only=True)
class Quest(ReadingPolicy):
    """Bound the scores of every page of keys by their elementwise minimum and maximum; read the most promising pages.

    The newest token's page is among them. Nothing is compressed: less is read. Prompts are read in full.

    Differs from the authors' code: one choice for each KV head, by the sum over its group, where they choose for every
    query head.

    Raises:
        ValueError: an option is out of range.
    """

    budget: Budget
    """Entries that are read, in whole pages, at least one; a ratio counts the prompt."""
    page_size: int = 16
    """Entries of a page, a divisor of the engine's `block_size`."""
    dense_layers: int = 2
    """First layers, which read everything."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size}: expected a number of entries >= 1, such as 16")
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers={self.dense_layers}: expected a number of layers >= 0")

    def fitted(self, num_layers: int, block_size: int) -> Quest:
        """See `CachePolicy.fitted`."""
        if block_size % self.page_size:
            raise ValueError(
                f"page_size={self.page_size}: expected a divisor of block_size={block_size}; "
                "give the engine block_size=, or the policy another page_size="
            )
        return self

    def num_pages(self, num_tokens: int, prompt_length: int) -> int:
        """Pages that one of `num_tokens` tokens reads: all of them while the budget holds all tokens."""
        limit, pages = self.budget.entries(prompt_length), -(-num_tokens // self.page_size)
        return pages if num_tokens <= limit else min(pages, max(1, limit // self.page_size))


def upper_bounds(query: Tensor, lowest: Tensor, largest: Tensor) -> Tensor:
    """Bound q . k for all keys of a page: sum over channels of max(q * lowest, q * largest), and over query heads.

    Args:
        query: [..., group, D].
        lowest: elementwise minimum of each page's keys, [..., pages, D].
        largest: elementwise maximum, [..., pages, D].
    Returns:
        [..., pages].
    """
    upwards, downwards = query.clamp_min(0).sum(-2)[..., None], query.clamp_max(0).sum(-2)[..., None]
    return (largest @ upwards + lowest @ downwards)[..., 0]
