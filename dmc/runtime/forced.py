"""A teacher-forced continuation, and the log-probabilities kept of each prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmc.runtime.generation import GenerationStats, Scoring

Keep = Callable[[Tensor, Tensor], Tensor]
"""Reduces log-probabilities, float32 [n, vocab], given the true tokens, int64 [n]."""


def of_all_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep everything, [n, vocab]."""
    return logprobs


def of_given_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep the log-probability of each true token, [n]."""
    return logprobs.gather(-1, tokens[:, None])[:, 0]


@dataclass(eq=False)
class Forced:
    """State of one teacher-forced continuation in the engine."""

    tokens: list[int]
    keep: Keep
    kept: list[Tensor] = field(default_factory=list)
    num_predicted: int = 0
    stats: GenerationStats | None = None
    """Memory at the last step; None until then."""
    error: Exception | None = None
    """Error that ended it early."""

    def add(self, logits: Tensor) -> None:
        """Reduce and keep the next predictions, [n, vocab]."""
        end = self.num_predicted + len(logits)
        tokens = torch.tensor(self.tokens[self.num_predicted : end], device=logits.device)
        self.kept.append(self.keep(logits.float().log_softmax(-1), tokens))
        self.num_predicted = end

    @property
    def is_finite(self) -> bool:
        """Whether all kept values are finite."""
        return all(not each.isnan().any() for each in self.kept)

    def scoring(self) -> Scoring:
        """Return the finished result."""
        assert self.stats is not None
        return Scoring(torch.cat(self.kept), self.stats)
