"""Choose the next tokens from logits: penalties, temperature, top-k, top-p, min-p; all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmc.ranks import Ranks
from dmc.runtime.options import SamplingParams


@dataclass(eq=False)
class History:
    """The tokens of a row so far, which penalties and processors look at."""

    tokens: list[int]
    """Prompt and continuation; it may grow."""
    begin: int = 0
    """Where the continuation begins."""
    slot: int | None = None
    """Its row in `TokenCounts`."""
    num_counted: int = 0
    """How many of the tokens are counted there."""


class TokenCounts:
    """How often each token occurs in histories, on the device; the new tokens of all rows are counted together.

    Args:
        vocab_size: size of the vocabulary.
        device: device of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(2, 0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def of(self, histories: Sequence[History]) -> Tensor:
        """Return how often each token occurs at all, and in the continuation, int32 [2, R, vocab]."""
        kinds: list[int] = []
        slots: list[int] = []
        tokens: list[int] = []
        for history in histories:
            slot = history.slot = self._open() if history.slot is None else history.slot
            new = history.tokens[history.num_counted :]
            generated = history.tokens[max(history.num_counted, history.begin) :]
            kinds += [0] * len(new) + [1] * len(generated)
            slots += [slot] * (len(new) + len(generated))
            tokens += new + generated
            history.num_counted = len(history.tokens)
        if tokens:
            place = torch.tensor([kinds, slots, tokens], device=self._counts.device)
            ones = torch.ones_like(place[0], dtype=torch.int32)
            self._counts.index_put_((place[0], place[1], place[2]), ones, accumulate=True)
        return self._counts[:, torch.tensor([history.slot for history in histories], device=self._counts.device)]

    def close(self, history: History) -> None:
        """Let others have a history's row."""
        if history.slot is not None:
            self._free.append(history.slot)

    def _open(self) -> int:
        if not self._free:
            size = self._counts.shape[1]
            more = max(size, 4)
            self._counts = torch.cat((self._counts, self._counts.new_zeros(2, more, self._counts.shape[2])), dim=1)
            self._free = list(range(size, size + more))
        slot = self._free.pop()
        self._counts[:, slot] = 0
        return slot


CANDIDATES = 1024
"""Most likely tokens that top_p alone looks at: a vocabulary takes milliseconds to sort."""


class Choice(NamedTuple):
    """The chosen tokens of R rows."""

    tokens: Tensor
    """Token ids, int64 [R]; -1 where more tokens than `CANDIDATES` may share top_p's mass: choose among all."""
    logprobs: Tensor
    """Natural-log probabilities under the unmodified distribution, NaN where no token could be chosen, float32 [R]."""
    top_tokens: Tensor
    """The most likely tokens, at least as many as any row asks for, int64 [R, k]."""
    top_logprobs: Tensor
    """Natural-log probabilities of `top_tokens`, float32 [R, k]."""

    def as_rows(self) -> Tensor:
        """Return token, log-probability, n pairs of a likely token and its log-probability: float64 [S, 2 + 2 n]."""
        top = torch.stack((self.top_tokens.double(), self.top_logprobs.double()), dim=-1).flatten(1)
        return torch.cat((self.tokens[:, None].double(), self.logprobs[:, None].double(), top), dim=1)


def new_generator(params: SamplingParams, ranks: Ranks, index: int = 0) -> torch.Generator | None:
    """Make the source of draws of a prompt's `index`-th continuation, the same on all ranks; None: it is greedy."""
    if params.temperature == 0:
        return None
    seed = ranks.all_reduce(int(torch.randint(2**62, ())), "min") if params.seed is None else params.seed
    return torch.Generator().manual_seed((seed + index) % 2**64)


class Sampling(NamedTuple):
    """Settings by which the next tokens of all rows are chosen."""

    settings: Tensor
    """Temperature (0: greedy), top_k (0: all), top_p, min_p and the uniform number, float64 [5, R] on the host."""
    width: int
    """Number of most likely tokens that top_k and top_p look at; -1: all rows are greedy; 0: no row has a limit."""
    num_top: int
    """How many of the most likely tokens are reported, at least."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], uniforms: Sequence[float], vocab_size: int) -> Sampling:
        """Combine the parameters of all rows; few widths and numbers occur, since each is recorded by itself."""
        settings = [(*row.numbers, uniform) for row, uniform in zip(params, uniforms, strict=True)]
        return cls(torch.tensor(settings, dtype=torch.float64).T, *mode_of(params, vocab_size))


def mode_of(params: Sequence[SamplingParams], vocab_size: int) -> tuple[int, int]:
    """Return `Sampling`'s width and number of reported tokens for these rows."""
    width = max((_width(row, vocab_size) for row in {row.numbers for row in params} if row[0] > 0), default=-1)
    num_top = max((row.top_logprobs for row in params), default=0)
    return width, min(_rounded(num_top, (0, 20), vocab_size), vocab_size)


def _width(numbers: tuple[float, float, float, float], vocab_size: int) -> int:
    _, top_k, top_p, min_p = numbers
    if not top_k and top_p == 1:
        return min(64, vocab_size) if min_p else 0
    return min(_rounded(top_k or CANDIDATES, (64, CANDIDATES), vocab_size), vocab_size)


def _rounded(number: float, steps: tuple[int, ...], otherwise: int) -> int:
    return next((step for step in steps if number <= step), otherwise)


class Distributions(NamedTuple):
    """What the next tokens of R rows are chosen by."""

    log_probs: Tensor
    """Unmodified log-probabilities, float32 [R, vocab]."""
    scores: Tensor
    """Log-probabilities to sample from, after penalties and processors; may be `log_probs`."""

    def choose(self, sampling: Sampling) -> Choice:
        """Choose as `choose` does."""
        settings = sampling.settings
        settings = settings if sampling.width < 0 else settings.to(self.log_probs.device, non_blocking=True)
        return choose(*self, settings, sampling.width, sampling.num_top)

    def choose_among_all(self, rows: list[int], sampling: Sampling) -> Choice:
        """Choose again, in rows that `Choice.tokens` leaves open."""
        among_all = Sampling(sampling.settings[:, rows], self.log_probs.shape[-1], sampling.num_top)
        return Distributions(self.log_probs[rows], self.scores[rows]).choose(among_all)


def distributions(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History | None] | None = None,
    counts: TokenCounts | None = None,
) -> tuple[Distributions, dict[int, Exception]]:
    """Apply penalties and processors.

    Args:
        logits: logits, [R, vocab].
        params: parameters of each row.
        histories: tokens of each row so far; None: its params do not change logits, or there is no token before.
        counts: how often these occurred, as far as they have been counted; None: they have not been.
    Returns:
        What the next token of every row is chosen by, and the errors of rows whose processors failed, by row.
    """
    log_probs = logits.float().log_softmax(-1)
    counts = counts or TokenCounts(logits.shape[-1], logits.device)
    scores, errors = _processed(log_probs, logits, params, histories or [None] * len(params), counts)
    return Distributions(log_probs, scores), errors


def choose(log_probs: Tensor, scores: Tensor, settings: Tensor, width: int, num_top: int) -> Choice:
    """Choose tokens on the device of the distributions, without waiting for it; no shape depends on data.

    A row's choice does not depend on the others.

    Args:
        log_probs: see `Distributions`.
        scores: see `Distributions`.
        settings: see `Sampling`, on the same device; not read if all rows are greedy.
        width: see `Sampling`.
        num_top: see `Sampling`.
    """
    tokens = scores.argmax(-1) if width < 0 else _draw(scores, settings, width)
    chosen = log_probs.gather(-1, tokens.clamp_min(0)[:, None])[:, 0]
    if scores is not log_probs:
        chosen = chosen.where(scores.amax(-1).isfinite(), torch.nan)
    top = log_probs.topk(num_top)
    return Choice(tokens, chosen, top.indices, top.values)


def _processed(
    log_probs: Tensor,
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History | None],
    counts: TokenCounts,
) -> tuple[Tensor, dict[int, Exception]]:
    """Apply penalties and processors to the rows that have any; other rows keep their log-probabilities."""
    errors: dict[int, Exception] = {}
    rows = [row for row, settings in enumerate(params) if settings.changes_logits]
    if not rows:
        return log_probs, errors
    device, past = logits.device, [histories[row] or History([]) for row in rows]
    came, generated = counts.of(past)  # both [rows, vocab]
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = [[getattr(params[row], name) for name in names] for row in rows]
    repetition, presence, frequency = torch.tensor(penalties, device=device).T[..., None]
    scores, changed = log_probs.clone(), logits[rows].float()
    changed = torch.where(came > 0, torch.where(changed < 0, changed * repetition, changed / repetition), changed)
    scores[rows] = changed - presence * (generated > 0) - frequency * generated
    for row, history in zip(rows, past, strict=True):
        if biases := params[row].logit_bias:
            scores[row, [*biases]] += torch.tensor([*biases.values()], device=device)
        if (processor := params[row].logits_processor) is not None:
            try:
                tokens = torch.tensor([history.tokens], dtype=torch.long, device=device)
                processed = processor(tokens, scores[row : row + 1])
                if processed.shape != (1, logits.shape[-1]):
                    raise ValueError(
                        f"logits_processor gave {tuple(processed.shape)}: expected {(1, logits.shape[-1])}"
                    )
                scores[row] = processed[0]
            except Exception as error:
                errors[row] = RuntimeError(f"logits_processor={processor!r:.80} failed: {error!r}")
                errors[row].__cause__ = error
    return scores, errors


def _draw(log_probs: Tensor, settings: Tensor, width: int) -> Tensor:
    """Invert the cumulative distributions at the uniform numbers; a greedy row's is a step at its first best token."""
    temperature, top_k, top_p, min_p, uniform = settings[..., None]
    scores = (log_probs - log_probs.amax(-1, keepdim=True)).div_(temperature.clamp(1e-30, 1e30).float())
    is_open = None
    if width:
        lowest, is_open = _lowest(scores, top_k, top_p, width)
        scores = scores.masked_fill_(scores < lowest.maximum(min_p.log().float()), -torch.inf)
    # float32 sums over a large vocabulary would misplace unlikely tokens
    cumulative = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    target = uniform * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(log_probs.shape[-1] - 1)
    return tokens if is_open is None else tokens.masked_fill(is_open, -1)


def _lowest(scores: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Return the lowest score that each row may sample, [R, 1], and in which rows it may lie below the best `width`.

    Ties stay, so that results do not depend on a sort.
    """
    best = scores.topk(width).values
    stays = (torch.arange(width, device=scores.device) < top_k) | (top_k == 0)
    kept = best.masked_fill(~stays, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True).where(top_k == 0, kept.logsumexp(-1, keepdim=True))
    probabilities = (kept - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    # a float32 may be no smaller, and the most likely token stays
    stays &= (before < top_p.clamp_min(torch.finfo(torch.float32).tiny)) | (top_p == 1)
    lowest = best.masked_fill(~stays, torch.inf).amin(-1, keepdim=True)
    has_limit = (top_k > 0) | (top_p < 1)
    is_open = (stays[:, -1:] & (top_k == 0) & has_limit)[:, 0] if width < scores.shape[-1] else None
    return lowest.masked_fill(~has_limit, -torch.inf), is_open
