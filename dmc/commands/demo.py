"""What caches keep of a text, colored in a terminal, and what they still answer about it when it is gone."""

from __future__ import annotations

import bisect
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import StrictBool, StrictInt
from torch import Tensor

from dmc.budget import Budget
from dmc.config.settings import Count, OutputFolder, checked_dataclass
from dmc.files import refuse_occupied
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.policies import H2O, SnapKV
from dmc.results.tasks import FactRecall, Sample
from dmc.results.tasks.cache_analysis import decisions_of, held_tokens
from dmc.runtime import Engine, SamplingParams

SHIPPED = Path(__file__).parents[1] / "demo_models"
LEVELS = (0.02, 0.1, 0.25, 0.5)
"""Shares of heads at which a token's color changes."""
SHADES = (236, 22, 28, 34, 40)
"""Backgrounds of a terminal with 256 colors, between and beyond the levels."""
DOTTED_BELOW = 0.25
"""Share of heads below which a token is dots where there are no colors."""
RESET = "\x1b[0m"


@checked_dataclass(frozen=True)
class ModelFolders:
    """Folders of both models; None: what comes with the package."""

    control: str | None = None
    retrofit: str | None = None


@checked_dataclass(frozen=True)
class DemoConfig:
    """Text, questions and models of a demonstration."""

    models: ModelFolders = field(default_factory=ModelFolders)
    text: str | None = None
    """A file; None: a module of Python's standard library."""
    length: Count = 512
    """Tokens of text and question."""
    keys: Count = 20
    """Facts in it."""
    questions: Count = 6
    seed: StrictInt = 0
    save: OutputFolder | None = None
    """A folder to keep both models in, in bfloat16, instead of asking them."""
    colors: StrictBool | None = None
    """None: where standard output is a terminal and NO_COLOR is not set."""


def demo(config: DemoConfig) -> None:
    """Print what each cache keeps and answers."""
    folders = {name: path or str(SHIPPED / name) for name, path in vars(config.models).items()}
    for name in folders if config.save else ():
        refuse_occupied(Path(str(config.save)) / name, overwrite=False)
    control, retrofit = (load_with_tokenizer(folders[name], "float32")[0] for name in ("control", "retrofit"))
    tokenizer = load_tokenizer(folders["retrofit"])
    if config.save:
        for name, model in (("control", control), ("retrofit", retrofit)):
            model.to(torch.bfloat16).save_pretrained(Path(config.save) / name)
            tokenizer.save_pretrained(Path(config.save) / name)
        return
    text = Path(config.text or textwrap.__file__).read_text()
    samples = text_and_questions(text, tokenizer, config.length, config.keys, config.questions, config.seed)
    colors = config.colors
    if colors is None:
        colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    facts = f"{len(samples[0].prompt)} tokens of code with {config.keys} facts such as `set KEY VALUE`"
    print(f"{facts}. Every cache below has compressed them\nbefore it was asked anything.\n\n{legend(colors)}")
    for block in page(witnesses(control, retrofit, tokenizer, samples), samples, tokenizer, colors=colors):
        print(block, flush=True)


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


def page(caches: Iterable[Witness], samples: Sequence[Sample], tokenizer: Any, *, colors: bool) -> Iterator[str]:
    """Yield what the terminal shows, a block for each witness as soon as it has answered.

    Args:
        caches: see `witnesses`.
        samples: text and questions.
        tokenizer: of the models.
        colors: False: tokens that few heads hold become dots.
    """
    pieces = [tokenizer.decode([token]) for token in samples[0].prompt]
    for cache in caches:
        right = sum(answer == sample.continuation[0] for answer, sample in zip(cache.answers, samples, strict=True))
        held = f"CR {cache.ratio:.1f}, {cache.num_bytes:,.0f} bytes a token"
        shown = (_shown(piece, float(share), colors) for piece, share in zip(pieces, cache.held, strict=True))
        yield f"\n{cache.name}: {held}, {right} of {len(samples)} answered\n\n{''.join(shown)}\n"
        for answer, sample in zip(cache.answers, samples, strict=True):
            tokens = (sample.after, [answer], sample.continuation)
            question, answered, expected = (tokenizer.decode(part).strip() or "(a space)" for part in tokens)
            yield f"  {question} -> {answered:<12} {'right' if answered == expected else f'wrong, it is {expected}'}"


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
