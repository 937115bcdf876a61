"""One request on its way through the engine, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmc.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class GenerationStats:
    """Memory of one sequence at its last step, before release."""

    tokens_seen: int
    """Tokens fed: prompt + new - 1, for the last token is not fed."""
    slots: Tensor
    """Entries held per layer and KV head, raw recent tokens included, int64 [L, H]."""
    achieved_ratio: float
    """tokens_seen * L * H / sum(slots), >= 1 for a compressed cache."""
    bytes_used: int
    """Slots and state: ring, means and tables included."""
    bytes_allocated: int
    """The same with whole pages."""
    num_preemptions: int
    """Times the sequence lost its cache to others and was computed again."""


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt."""

    token_ids: list[int]
    text: str | None
    """None without a tokenizer."""
    logprobs: list[float]
    """Natural-log probability of each chosen token under the unmodified distribution."""
    stats: GenerationStats


@dataclass
class Sequence:
    """State of a request; `row` is its place in the cache while it runs."""

    prompt: list[int]
    params: SamplingParams
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    row: int | None = None
    num_fed: int = 0
    num_preemptions: int = 0
    generator: torch.Generator | None = None
    stats: GenerationStats | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and continuation so far."""
        return self.prompt + self.generated

    @property
    def num_waiting(self) -> int:
        """Tokens that are known but not yet fed."""
        return len(self.prompt) + len(self.generated) - self.num_fed
