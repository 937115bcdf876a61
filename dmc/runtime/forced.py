"""A continuation that a sequence is forced along, and what is kept of each prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmc.runtime.generation import GenerationStats, Scoring

Keep = Callable[[Tensor, Tensor], Tensor]
"""Chooses what is kept of log-probabilities, float32 [n, vocab], and the tokens that really came, int64 [n]."""


def of_all_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep everything, [n, vocab]."""
    return logprobs


def of_given_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep the log-probability of each token that came, [n]."""
    return logprobs.gather(-1, tokens[:, None])[:, 0]


@dataclass(eq=False)
class Forced:
    """One continuation on its way through the engine."""

    tokens: list[int]
    keep: Keep
    kept: list[Tensor] = field(default_factory=list)
    num_predicted: int = 0
    stats: GenerationStats | None = None
    """Memory at the last step; None: that is still to come."""
    error: Exception | None = None
    """Why it could not go on."""

    def add(self, logits: Tensor) -> None:
        """Keep what is wanted of the next predictions, [n, vocab]."""
        end = self.num_predicted + len(logits)
        tokens = torch.tensor(self.tokens[self.num_predicted : end], device=logits.device)
        self.kept.append(self.keep(logits.float().log_softmax(-1), tokens))
        self.num_predicted = end

    @property
    def is_finite(self) -> bool:
        """Whether all that was kept are numbers."""
        return all(not each.isnan().any() for each in self.kept)

    def scoring(self) -> Scoring:
        """Put it together."""
        assert self.stats is not None
        return Scoring(torch.cat(self.kept), self.stats)
