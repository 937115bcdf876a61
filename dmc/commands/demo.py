"""What caches keep of a text, colored in a terminal, and what they still answer about it when it is gone."""

from __future__ import annotations

import bisect
import itertools
import os
import random
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
from dmc.config import build_config
from dmc.config.settings import Count, OutputFolder, checked_dataclass
from dmc.files import refuse_occupied
from dmc.gguf import ModelName
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.models.weights import find_base, is_adapter
from dmc.policies import H2O, SnapKV
from dmc.results.tasks import FactRecall, Needle, Sample
from dmc.results.tasks.cache_analysis import decisions_of, held_tokens
from dmc.results.tasks.prompts import Encoder
from dmc.results.tasks.retrieval import NAMES
from dmc.runtime import Engine, SamplingParams

SHIPPED = Path(__file__).parents[1] / "demo_models"
LEVELS = (0.02, 0.1, 0.25, 0.5)
"""Shares of heads at which a token's color changes."""
SHADES = (236, 22, 28, 34, 40)
"""Backgrounds of a terminal with 256 colors, between and beyond the levels."""
DOTTED_BELOW = 0.25
"""Share of heads below which a token is dots where there are no colors."""
RESET = "\x1b[0m"
ASKED = "\nWhat is the magic number of {name}? The magic number of {name} is"
"""The answer begins with the town's name again: a small base with its full cache else confuses the towns."""


@checked_dataclass(frozen=True)
class ModelFolders:
    """Folders of both models; None: what comes with the package."""

    control: str | None = None
    retrofit: str | None = None


@checked_dataclass(frozen=True)
class DemoConfig:
    """Text, questions and models of a demonstration."""

    model: ModelName | None = None
    """Gates alone, such as the shipped smollm2-135m-cr4, beside their base; None: `models`."""
    models: ModelFolders = field(default_factory=ModelFolders)
    text: str | None = None
    """A file; None: a module of Python's standard library."""
    length: Count = 512
    """Tokens of text and question."""
    keys: Count | None = None
    """Facts in it; None: 20, or of `model` 6."""
    questions: Count = 6
    seed: StrictInt = 0
    save: OutputFolder | None = None
    """A folder to keep both models in, in bfloat16, instead of asking them."""
    colors: StrictBool | None = None
    """None: where standard output is a terminal and NO_COLOR is not set."""

    def folders(self) -> dict[str, str]:
        """Return the folders of both models.

        Raises:
            FileNotFoundError, ValueError: the model is no gates alone, or has no base here.
        """
        if self.model is None:
            return {name: path or str(SHIPPED / name) for name, path in vars(self.models).items()}
        if not is_adapter(Path(self.model)):
            raise ValueError(f"model={self.model} is no folder of gates alone: give models.control and models.retrofit")
        return {"control": str(find_base(Path(self.model))), "retrofit": self.model}


def demo(config: DemoConfig) -> None:
    """Print what each cache keeps and answers."""
    folders = config.folders()
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
    if config.model is None:
        keys, said = config.keys or 20, "facts such as `set KEY VALUE`"
        samples = text_and_questions(text, tokenizer, config.length, keys, config.questions, config.seed)
    else:
        keys, said = config.keys or 6, "facts such as `The magic number of Oslo is 31415`"
        samples = numbers_and_questions(text, tokenizer, config.length, keys, config.questions, config.seed)
    colors = config.colors
    if colors is None:
        colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    facts = f"{len(samples[0].prompt)} tokens of code with {keys} {said}"
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
        answers: token ids, for each question.
    """

    name: str
    held: Tensor
    ratio: float
    num_bytes: float
    answers: list[list[int]]


def interview(name: str, engine: Engine, samples: Sequence[Sample]) -> Witness:
    """Let a cache read the samples' common text, then ask each question from a fork of it."""
    text, answers = samples[0].prompt, list[list[int]]()
    with engine.session() as session:
        stats = session.feed(text)
        gates = getattr(engine.model, "compression", None) is not None
        held = held_tokens(session, len(text), decisions_of(engine.model, text) if gates else None)
        for sample in samples:
            with session.fork() as fork:
                params = SamplingParams(max_new_tokens=len(sample.continuation), temperature=0.0, ignore_eos=True)
                answers.append(list(fork.generate(sample.after, params).token_ids))
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


def numbers_and_questions(
    text: str, tokenizer: Any, length: int, keys: int, questions: int, seed: int = 0
) -> list[Sample]:
    """Write numbers of towns into a text, spread evenly, and ask for some of them, each by its name.

    Args:
        text: what stands between the numbers; repeated if it is short.
        tokenizer: of the model.
        length: tokens of text and question.
        keys: numbers.
        questions: at most as many.
        seed: of the draw.
    Raises:
        ValueError: there are fewer towns, or numbers than questions, or the text has no room for them.
    """
    if not questions <= keys <= len(NAMES):
        raise ValueError(f"keys={keys}, questions={questions}: expected questions <= keys <= {len(NAMES)}")
    draw, encoder = random.Random(seed), Encoder(tokenizer)
    said = [{"name": name, "number": draw.randrange(10**4, 10**5)} for name in draw.sample(NAMES, keys)]
    facts = [encoder.encode(Needle.fact.format(**fact)) for fact in said]
    asked = [[*itertools.chain(*encoder.ask(ASKED.format(**fact)))] for fact in said]
    room = length - len(encoder.begin) - sum(map(len, facts)) - max(map(len, asked))
    if room < keys:
        raise ValueError(f"length={length} leaves no room for {keys} facts and a question: give {length + keys - room}")
    tokens = encoder.encode(text)
    tokens = (tokens * (room // len(tokens) + 1))[:room]
    cuts = [place * room // keys for place in range(keys + 1)]
    parts = [[*tokens[begin:end], *fact] for begin, end, fact in zip(cuts[:-1], cuts[1:], facts, strict=True)]
    context = [*encoder.begin, *(token for part in parts for token in part)]
    chosen = sorted(draw.sample(range(keys), questions))
    answers = [encoder.encode(f" {said[number]['number']}") for number in chosen]
    return [Sample(context, answer, {}, after=asked[number]) for number, answer in zip(chosen, answers, strict=True)]


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
        right = sum(answer == sample.continuation for answer, sample in zip(cache.answers, samples, strict=True))
        held = f"CR {cache.ratio:.1f}, {cache.num_bytes:,.0f} bytes a token"
        shown = (_shown(piece, float(share), colors) for piece, share in zip(pieces, cache.held, strict=True))
        yield f"\n{cache.name}: {held}, {right} of {len(samples)} answered\n\n{''.join(shown)}\n"
        for answer, sample in zip(cache.answers, samples, strict=True):
            tokens = (sample.after, answer, sample.continuation)
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


def main(settings: Any) -> None:
    """Show the demonstration."""
    demo(build_config(DemoConfig, settings))
