"""Teacher forcing: tokens that are given instead of chosen, and what is kept of their predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmc.runtime.generation import Step

Keep = Callable[[Tensor, Tensor], Tensor]
"""Reduces log-probabilities, float32 [n, vocab], given the true tokens, int64 [n]."""


def of_all_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep everything, [n, vocab]."""
    return logprobs


def of_given_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep the log-probability of each true token, [n]."""
    return logprobs.gather(-1, tokens[:, None])[:, 0]


def of_most_likely(count: int) -> Keep:
    """Keep each true token's log-probability, and the most likely tokens with theirs, float64 [n, 1 + 2 count]."""

    def keep(logprobs: Tensor, tokens: Tensor) -> Tensor:
        values, indices = logprobs.topk(min(count, logprobs.shape[-1]))
        pairs = torch.stack((indices.double(), values.double()), dim=-1).flatten(1)
        return torch.cat((of_given_tokens(logprobs, tokens)[:, None], pairs), dim=-1)

    return keep


@dataclass
class Forced:
    """Tokens that are given, in their order, and what is kept of the predictions so far."""

    tokens: list[int]
    keep: Keep = of_all_tokens
    kept: list[Tensor] = field(default_factory=list)
    num_predicted: int = 0

    def take(self, logits: Tensor) -> int:
        """Reduce and keep predictions, [n, vocab], of the next tokens; return how many of these are given."""
        tokens = self.tokens[self.num_predicted : self.num_predicted + len(logits)]
        if tokens:
            logprobs = logits[: len(tokens)].float().log_softmax(-1)
            self.kept.append(self.keep(logprobs, torch.tensor(tokens, device=logits.device)))
            self.num_predicted += len(tokens)
        return len(tokens)

    @property
    def is_finite(self) -> bool:
        """Whether all kept values are finite."""
        return all(not each.isnan().any() for each in self.kept)

    @property
    def steps(self) -> list[Step]:
        """The tokens that have been predicted, of which `of_most_likely` has kept what is reported."""
        rows = [row for each in self.kept for row in each.tolist()]
        return [
            (token, given, dict(zip(map(int, top[::2]), top[1::2], strict=True)))
            for token, (given, *top) in zip(self.tokens, rows, strict=False)
        ]
