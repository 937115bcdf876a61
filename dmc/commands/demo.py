"""What caches keep of a text, colored in a terminal, and what they still answer about it when it is gone."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmc.budget import Budget
from dmc.policies import H2O, SnapKV
from dmc.results.tasks import FactRecall, Sample
from dmc.results.tasks.cache_analysis import decisions_of, held_tokens
from dmc.runtime import Engine, SamplingParams

LEVELS = (0.02, 0.1, 0.25, 0.5)
"""Shares of heads at which a token's color changes."""
SHADES = (236, 22, 28, 34, 40)
"""Backgrounds of a terminal with 256 colors, between and beyond the levels."""
DOTTED_BELOW = 0.25
"""Share of heads below which a token is dots where there are no colors."""
RESET = "\x1b[0m"


@dataclass
class Witness:
    """A cache that has read the text, and what it answered.

    Args:
        name: of the method.
        held: share of the heads of all layers that hold each token, float [T].
        ratio: compression ratio held at the end of the text.
        num_bytes: of the cache for each token of the text.
        answers: token ids, one for each question.
    """

    name: str
    held: Tensor
    ratio: float
    num_bytes: float
    answers: list[int]


def interview(name: str, engine: Engine, samples: Sequence[Sample]) -> Witness:
    """Let a cache read the samples' common text, then ask each question from a fork of it."""
    text, answers = samples[0].prompt, []
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    with engine.session() as session:
        stats = session.feed(text)
        gates = getattr(engine.model, "compression", None) is not None
        held = held_tokens(session, len(text), decisions_of(engine.model, text) if gates else None)
        for sample in samples:
            with session.fork() as fork:
                answers += fork.generate(sample.after, params).token_ids
    return Witness(name, held.float().mean((0, 1)), stats.achieved_ratio, stats.bytes_used / len(text), answers)


def witnesses(control: Any, retrofit: Any, tokenizer: Any, samples: Sequence[Sample]) -> Iterator[Witness]:
    """Interview a full cache, the learned one, and two training-free methods in as many slots as it holds."""
    yield interview("full cache", Engine(control, tokenizer), samples)
    learned = interview("learned", Engine(retrofit, tokenizer), samples)
    yield learned
    budget = Budget(ratio=max(1.0, learned.ratio))
    for policy in (H2O(budget=budget), SnapKV(budget=budget)):
        yield interview(type(policy).__name__, Engine(control, tokenizer, policy), samples)


def text_and_questions(
    text: str, tokenizer: Any, length: int, keys: int, questions: int, seed: int = 0, **options: Any
) -> list[Sample]:
    """Write facts into a text, and ask for some of them.

    Args:
        text: what stands between the facts.
        tokenizer: of the models.
        length: tokens of text and question.
        keys: facts.
        questions: at most as many.
        seed: of the draw.
        options: further ones of `FactRecall`.
    Raises:
        ValueError: see `FactRecall`.
    """
    task = FactRecall(haystack=text, lengths=[length], keys=keys, questions=questions, contexts=1, seed=seed, **options)
    return task.samples(tokenizer, len(tokenizer))


def page(told: Iterable[Witness], samples: Sequence[Sample], tokenizer: Any, *, colors: bool) -> Iterator[str]:
    """Yield what the terminal shows, a block for each witness as soon as it has answered.

    Args:
        told: see `witnesses`.
        samples: text and questions.
        tokenizer: of the models.
        colors: False: tokens that few heads hold become dots.
    """
    pieces = [tokenizer.decode([token]) for token in samples[0].prompt]
    for each in told:
        right = sum(answer == sample.continuation[0] for answer, sample in zip(each.answers, samples, strict=True))
        held = f"CR {each.ratio:.1f}, {each.num_bytes:,.0f} bytes a token"
        shown = (_shown(piece, float(share), colors) for piece, share in zip(pieces, each.held, strict=True))
        yield f"\n{each.name}: {held}, {right} of {len(samples)} answered\n\n{''.join(shown)}\n"
        for answer, sample in zip(each.answers, samples, strict=True):
            tokens = (sample.after, [answer], sample.continuation)
            asked, said, wanted = (tokenizer.decode(each).strip() or "(a space)" for each in tokens)
            yield f"  {asked} -> {said:<12} {'right' if said == wanted else f'wrong, it is {wanted}'}"


def legend(colors: bool) -> str:
    """Say what the colors mean."""
    if not colors:
        return f"A dot stands for each letter of a token that less than {DOTTED_BELOW:.0%} of the heads hold."
    names = ["held by hardly a head", *(f"by {level:.0%} or more" for level in LEVELS)]
    return "  ".join(f"\x1b[48;5;{shade}m {name} {RESET}" for shade, name in zip(SHADES, names, strict=True))


def _shown(piece: str, share: float, colors: bool) -> str:
    if not colors:
        return piece if share >= DOTTED_BELOW else "".join(letter if letter.isspace() else "·" for letter in piece)
    shade = SHADES[bisect.bisect(LEVELS, share)]
    # A background that runs to the edge of the line after a line's end would color what nobody holds.
    return "\n".join(f"\x1b[48;5;{shade}m{part}{RESET}" if part else "" for part in piece.split("\n"))
