"""From logits to the next token: greedy, temperature, top-k, top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int = 64
    """Tokens to generate at most, >= 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    """Sample among the k most likely tokens."""
    top_p: float = 1.0
    """Sample among the fewest tokens whose probabilities reach this sum, in (0, 1]."""
    seed: int | None = None
    """Seed of this request's own generator; None: torch's default generator."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after one of these, besides the model's own end of sequence."""
    ignore_eos: bool = False
    """Go on after the model's end of sequence."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: expected a whole number >= 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: expected a number >= 0 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: expected a whole number >= 1, or None")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected a number in (0, 1]")


def sample_token(log_probs: Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    """Choose a token id from log-probabilities [vocab]."""
    if params.temperature == 0:
        return int(log_probs.argmax())
    scores, tokens = (log_probs / params.temperature).sort(descending=True, stable=True)
    if params.top_k is not None:
        scores, tokens = scores[: params.top_k], tokens[: params.top_k]
    probabilities = scores.softmax(-1)
    if params.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.where(before < params.top_p, 0.0)
    return int(tokens[torch.multinomial(probabilities.cpu(), 1, generator=generator).to(tokens.device)])
