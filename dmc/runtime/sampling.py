"""From logits to the next token: greedy, temperature, top-k, top-p; all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmc.runtime.arguments import index_of, real_number, whole_number


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
    """Sample among the k most likely tokens, and those as likely as the k-th."""
    top_p: float = 1.0
    """Sample among the most likely tokens whose probabilities reach this sum, in (0, 1]."""
    seed: int | None = None
    """Seed of this request's own generator, in [0, 2**64); None: torch's default generator draws one."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop after one of these, besides the model's own end of sequence."""
    ignore_eos: bool = False
    """Go on after the model's end of sequence."""
    stop: tuple[str, ...] = ()
    """Stop when the text contains one of these; the text ends before it. Needs a tokenizer."""

    def __post_init__(self) -> None:
        # values of NumPy, and lists, become Python's own
        self._set("max_new_tokens", whole_number("max_new_tokens", self.max_new_tokens))
        self._set("temperature", real_number("temperature", self.temperature, "a number >= 0 (0 is greedy)"))
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: expected a number >= 0 (0 is greedy)")
        if self.top_k is not None:
            self._set("top_k", whole_number("top_k", self.top_k, also=", or None"))
        self._set("top_p", real_number("top_p", self.top_p, "a number in (0, 1]"))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected a number in (0, 1]")
        if self.seed is not None:
            self._set("seed", whole_number("seed", self.seed, least=0, most=2**64 - 1, also=", or None"))
        given = self.stop_token_ids
        ids = tuple(map(index_of, given)) if isinstance(given, list | tuple | set | frozenset) else (None,)
        if any(token is None or token < 0 for token in ids):
            raise ValueError(f"stop_token_ids={given!r}: expected a tuple of token ids >= 0")
        self._set("stop_token_ids", ids)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: expected True or False")
        texts = self.stop
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"stop={texts!r}: expected a tuple of strings that are not empty")
        self._set("stop", tuple(texts))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def choose_tokens(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> tuple[Tensor, Tensor]:
    """Choose the next token of every row; a row's choice does not depend on the others.

    Args:
        logits: [R, vocab].
        params: of each row.
        generators: of each row, on the CPU; a sampled row takes one number. None: torch's default generator.
    Returns:
        Token ids, int64 [R], and their natural-log probabilities in the unmodified distribution, float32 [R].
    """
    log_probs = logits.float().log_softmax(-1)
    sampled = [row for row, each in enumerate(params) if each.temperature > 0]
    if len(sampled) < len(params):
        tokens = log_probs.argmax(-1)
    else:
        tokens = torch.empty(len(params), dtype=torch.long, device=logits.device)
    if sampled:
        uniform = torch.cat([torch.rand(1, dtype=torch.float64, generator=generators[row]) for row in sampled])
        rows = log_probs if len(sampled) == len(params) else log_probs[sampled]
        tokens[sampled] = _draw(rows, [params[row] for row in sampled], uniform)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _draw(log_probs: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution at `uniform`, float64 [R] in [0, 1)."""
    temperature = torch.tensor([min(max(each.temperature, 1e-30), 1e30) for each in params], device=log_probs.device)
    scores = (log_probs - log_probs.amax(-1, keepdim=True)).div_(temperature[:, None])
    for limits in {(each.top_k, each.top_p) for each in params} - {(None, 1)}:
        rows = [row for row, each in enumerate(params) if (each.top_k, each.top_p) == limits]
        scores[rows] = _truncate(scores[rows], *limits)
    # float32 sums over a large vocabulary would misplace unlikely tokens
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    target = uniform.to(log_probs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(log_probs.shape[-1] - 1)


def _truncate(scores: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Leave the most likely tokens, ties included so that the order of a sort has no say."""
    best = scores.topk(min(top_k or scores.shape[-1], scores.shape[-1])).values
    if top_p < 1:
        probabilities = best.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # a float32 may be no smaller, and the most likely token stays
        best = best.where(before < max(top_p, torch.finfo(torch.float32).tiny), torch.inf)
    return scores.masked_fill(scores < best.amin(-1, keepdim=True), -torch.inf)
