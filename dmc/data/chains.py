"""Problems with solutions that are written out step by step: training and evaluation data for reasoning.

A problem is a program: inputs with a digit each, and lines that add two variables modulo 10. Every variable is
assigned once. One operand of a line is a variable that no line has used yet, the other is drawn from all earlier
ones, so nearly every line counts. Asked is for the value of the last one. The solution runs the program line by line:

    a7c3|e=a+c,g=e+a,?          inputs, then lines
    e=a+c:a7+c3=e0              the line, the line with its operands' values, and its own value
    g=e+a:e0+a7=g7
    ?g7                         the answer

Every line needs what stands far back: itself, in the program; the values of its operands, among the inputs or in any
earlier line; the name of the next line, behind it in the program. Each of these steps finds what followed a name
elsewhere, or what stands at a fixed distance from it, and the rest is a table of 100 sums. Solutions that are sampled
err in different steps, and in different digits.

Values of names are what a small model learns last: it guesses among the digits. Two lessons come first, in documents
without a program: copies of random symbols, then pairs of names and symbols that are said again in other orders.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, get_args

import numpy as np

from dmc.data.code import Split, split_of
from dmc.data.drawn import DrawnSource

NAMES = string.ascii_letters
"""Names of variables."""
MOST_INPUTS = 4
MOST_LINES = len(NAMES) - MOST_INPUTS
SEPARATORS = (" ", ",", ";", "/")
SIGNS = ("=", ":", "<")
"""Forms of problems: a line ends with a separator, its name with a sign."""
UNSEEN = {("=", "/"), (":", ";"), ("<", ",")}
"""Signs and separators that no training shows together."""
ANSWER = re.compile(r"\?[a-zA-Z](\d)\Z")

RARE = "".join(map(chr, range(0x100, 0x280)))
"""Letters that lessons alone have; the tokenizer learns a token for each."""
SYMBOLS = string.digits + string.punctuation + RARE
"""Values in lessons: so many that a guess is worth nothing and only looking one up helps, unlike with 10 digits."""

Forms = Literal["seen", "unseen"]
Lesson = Literal["copies", "pairs"]


@dataclass(frozen=True)
class Line:
    """A sum; operands are numbers of variables: of the inputs, then of the lines before."""

    first: int
    second: int


@dataclass(frozen=True)
class Problem:
    """A program, and its text."""

    names: str
    """One letter for each variable: inputs, then lines."""
    inputs: tuple[int, ...]
    """Digits of the inputs."""
    lines: tuple[Line, ...]
    prompt: str
    """The program as text."""

    @cached_property
    def values(self) -> list[int]:
        """Digit of each variable."""
        found = list(self.inputs)
        for line in self.lines:
            found.append((found[line.first] + found[line.second]) % 10)
        return found

    @property
    def answer(self) -> str:
        """Value of the last line."""
        return str(self.values[-1])

    @cached_property
    def solution(self) -> str:
        """The program, run line by line."""
        named = [f"{name}{value}" for name, value in zip(self.names, self.values, strict=True)]
        lines = [
            f"{named[number][0]}={named[line.first][0]}+{named[line.second][0]}:"
            f"{named[line.first]}+{named[line.second]}={named[number]}\n"
            for number, line in enumerate(self.lines, len(self.inputs))
        ]
        return f"{''.join(lines)}?{named[-1]}"


def answer_of(solution: str) -> str | None:
    """Return the answer at the end of a solution; None: it has not come to one."""
    found = ANSWER.search(solution)
    return None if found is None else found[1]


def draw_problem(
    size: int, draw: np.random.Generator, split: Split, forms: Forms = "seen", digits: int = 10
) -> Problem:
    """Draw a problem of a split: by a hash of the program, whatever its letters and its form.

    Args:
        size: number of lines.
        draw: source of randomness.
        split: see `split_of`.
        forms: whether it is written in a form that occurs in training.
        digits: number of digits that inputs are drawn from, the smallest ones.
    """
    while True:
        inputs = draw.integers(digits, size=draw.integers(2, MOST_INPUTS + 1)).tolist()
        lines = _draw_lines(len(inputs), size, draw)
        if split_of(f"{inputs} {lines}") == split:
            break
    names = "".join(draw.permutation(list(NAMES))[: len(inputs) + size])
    return Problem(names, tuple(inputs), tuple(lines), _written(names, inputs, lines, draw, forms))


def _draw_lines(num_inputs: int, size: int, draw: np.random.Generator) -> list[Line]:
    """Draw operands of each line: a variable that no line has used yet, and any other earlier one, in either order."""
    unused, lines = list(range(num_inputs)), list[Line]()
    for number in range(num_inputs, num_inputs + size):
        needed = unused.pop(int(draw.integers(len(unused))))
        other = int(draw.integers(number - 1))
        other += other >= needed
        first, second = (needed, other) if draw.random() < 0.5 else (other, needed)
        lines.append(Line(first, second))
        unused = [*(left for left in unused if left != other), number]
    return lines


def _written(names: str, inputs: list[int], lines: list[Line], draw: np.random.Generator, forms: Forms) -> str:
    pairs = [(sign, end) for sign in SIGNS for end in SEPARATORS if ((sign, end) in UNSEEN) == (forms == "unseen")]
    sign, end = pairs[int(draw.integers(len(pairs)))]
    given = "".join(f"{name}{value}" for name, value in zip(names, inputs, strict=False))
    run = "".join(
        f"{name}{sign}{names[line.first]}+{names[line.second]}{end}"
        for name, line in zip(names[len(inputs) :], lines, strict=True)
    )
    return f"{given}|{run}?\n"


def draw_copy(draw: np.random.Generator) -> tuple[str, ...]:
    """Draw 16 random symbols and letters, and the same again; the end is not learned, or lengths would be counted."""
    text = "".join(draw.choice(list(SYMBOLS + NAMES), size=16).tolist())
    return text, text, ""


def draw_pairs(letters: int, draw: np.random.Generator) -> tuple[str, ...]:
    """Draw 4 of the first letters with a symbol each; all are said, then asked for three times, in random orders."""
    names = draw.permutation(list(NAMES[:letters]))[:4].tolist()
    values = dict(zip(names, draw.choice(list(SYMBOLS), size=4).tolist(), strict=True))
    said = "".join(f"{name}{value}" for name, value in values.items())
    asked = [name for _ in range(3) for name in draw.permutation(names)]
    parts = [part for name in asked for part in (name, values[name])]
    return (f"{said}{parts[0]}", *parts[1:], "")


@dataclass(frozen=True)
class ChainSource(DrawnSource):
    """Problems with one solution each, of which the solutions are trained on; a function of split and seed."""

    kind: ClassVar = "chains"
    per_shard: ClassVar = 256

    split: Split = "train"
    problems: int = 1000
    """Number of problems."""
    smallest: int = 2
    """Lines of the smallest problem."""
    largest: int = MOST_LINES
    """Lines of the largest problem."""
    digits: int = 10
    """Number of digits that inputs are drawn from, the smallest ones: of few, each operand tells much of the sum."""
    lesson: Lesson | None = None
    """What comes instead of problems, each of 32 tokens; None: problems."""
    letters: int = len(NAMES)
    """Number of letters that a lesson's names are drawn from."""
    seed: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.lesson not in (None, *get_args(Lesson)) or not 4 <= self.letters <= len(NAMES):
            raise ValueError(
                f"lesson={self.lesson!r}, letters={self.letters}: expected null or one of {list(get_args(Lesson))}, "
                f"and 4 to {len(NAMES)} letters"
            )
        if not 1 <= self.digits <= 10:
            raise ValueError(f"digits={self.digits}: expected 1 to 10")
        if not 1 <= self.smallest <= self.largest <= MOST_LINES:
            raise ValueError(
                f"smallest={self.smallest}, largest={self.largest}: expected 1 <= smallest <= largest <= {MOST_LINES}"
            )
        if self.problems < 1:
            raise ValueError(f"problems={self.problems}: expected at least one")
        super().__post_init__()

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"chains:{self.split}{f':{self.lesson}' if self.lesson else ''}"

    @property
    def has_loss_mask(self) -> bool:
        """Solutions are trained on, problems are not."""
        return True

    @property
    def num_documents(self) -> int:
        """Number of problems."""
        return self.problems

    def num_bytes(self) -> int:
        """Return the approximate size: a line has 6 characters of the problem and 15 of the solution."""
        return self.problems * 21 * (self.smallest + self.largest) // 2

    def draw(self, number: int) -> tuple[str, ...]:
        """Draw a problem and its solution, or prompts and completions of a lesson."""
        draw = self.generator(number)
        if self.lesson == "copies":
            return draw_copy(draw)
        if self.lesson == "pairs":
            return draw_pairs(self.letters, draw)
        size = int(draw.integers(self.smallest, self.largest + 1))
        problem = draw_problem(size, draw, self.split, digits=self.digits)
        return problem.prompt, problem.solution
