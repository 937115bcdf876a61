"""Problems with solutions that are written out step by step: training and evaluation data for reasoning.

A problem is a program: inputs with a digit each, and lines that add or subtract two variables modulo 10. Every variable
is assigned once. One operand of a line is a variable that no line has used yet, the other is drawn from all earlier
ones, so nearly every line counts. Asked is for the value of the last one. The solution runs the program line by line:

    a7,c3,|e=a+c,g=e-a,?        inputs, then lines
    e=a+c:a7+c3=e0              the line, the line with its operands' values, and its own value
    g=e-a:e0-a7=g3
    ?3                          the answer

Every line needs what stands far back: itself, in the program; the values of its operands, among the inputs or in any
earlier line; the name of the next line, behind it in the program. Each of these steps finds what followed a name
elsewhere, or what stands at a fixed distance from it, and the rest is a table of 200 sums and differences: so a model
of a million parameters learns it in minutes. A step that goes wrong gives one of nine wrong digits. Solutions that are
sampled err in different steps, and in different digits.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from datasets import IterableDataset

from dmc.data.code import Split, split_of
from dmc.data.sources import Document, DocumentSource

NAMES = string.ascii_letters
"""Names of variables."""
MOST_INPUTS = 4
MOST_LINES = len(NAMES) - MOST_INPUTS
SEPARATORS = (" ", ",", ";", "/")
SIGNS = ("=", ":", "<")
"""Forms of problems: an item ends with a separator, and a line's name with a sign."""
UNSEEN = {("=", "/"), (":", ";"), ("<", ",")}
"""Signs and separators that no training shows together."""
HELD_OUT_SIZES = (12, 20, 28, 36, 44)
"""Numbers of lines that no training shows."""
ANSWER = re.compile(r"\?(\d)\Z")
_PER_SHARD = 256  # problems that are drawn from one seed

Forms = Literal["seen", "unseen"]


@dataclass(frozen=True)
class Line:
    """An assignment; operands are numbers of variables: of the inputs, then of the lines before."""

    first: int
    sign: Literal["+", "-"]
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
            second = found[line.second] if line.sign == "+" else -found[line.second]
            found.append((found[line.first] + second) % 10)
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
            f"{named[number][0]}={named[line.first][0]}{line.sign}{named[line.second][0]}:"
            f"{named[line.first]}{line.sign}{named[line.second]}={named[number]}\n"
            for number, line in enumerate(self.lines, len(self.inputs))
        ]
        return f"{''.join(lines)}?{self.answer}"


def answer_of(solution: str) -> str | None:
    """Return the answer at the end of a solution; None: it has not come to one."""
    found = ANSWER.search(solution)
    return None if found is None else found[1]


def draw_problem(size: int, draw: np.random.Generator, split: Split, forms: Forms = "seen") -> Problem:
    """Draw a problem of a split: by a hash of the program, whatever its letters and its form.

    Args:
        size: number of lines.
        draw: source of randomness.
        split: see `split_of`.
        forms: whether it is written in a form that occurs in training.
    """
    while True:
        inputs = draw.integers(10, size=draw.integers(2, MOST_INPUTS + 1)).tolist()
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
        lines.append(Line(first, "+" if draw.random() < 0.5 else "-", second))
        unused = [*(left for left in unused if left != other), number]
    return lines


def _written(names: str, inputs: list[int], lines: list[Line], draw: np.random.Generator, forms: Forms) -> str:
    pairs = [(sign, end) for sign in SIGNS for end in SEPARATORS if ((sign, end) in UNSEEN) == (forms == "unseen")]
    sign, end = pairs[int(draw.integers(len(pairs)))]
    given = "".join(f"{name}{value}{end}" for name, value in zip(names, inputs, strict=False))
    run = "".join(
        f"{name}{sign}{names[line.first]}{line.sign}{names[line.second]}{end}"
        for name, line in zip(names[len(inputs) :], lines, strict=True)
    )
    return f"{given}|{run}?\n"


@dataclass(frozen=True)
class ChainSource(DocumentSource):
    """Problems with one solution each, of which the solutions are trained on; a function of split and seed."""

    split: Split = "train"
    problems: int = 1000
    """Number of problems."""
    smallest: int = 2
    """Lines of the smallest problem."""
    largest: int = MOST_LINES
    """Lines of the largest problem."""
    seed: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise ValueError(f"split={self.split!r} is unknown; choose one of {list(get_args(Split))}.")
        if not 1 <= self.smallest <= self.largest <= MOST_LINES:
            raise ValueError(
                f"smallest={self.smallest}, largest={self.largest}: expected 1 <= smallest <= largest <= {MOST_LINES}"
            )
        if not self.sizes or self.problems < 1:
            raise ValueError(f"problems={self.problems} of sizes {self.sizes}: expected at least one of each")
        super().__post_init__()

    @property
    def sizes(self) -> list[int]:
        """Numbers of lines, without those that training does not show."""
        return [size for size in range(self.smallest, self.largest + 1) if size not in HELD_OUT_SIZES]

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"chains:{self.split}"

    @property
    def has_loss_mask(self) -> bool:
        """Solutions are trained on, problems are not."""
        return True

    def check(self) -> None:
        """Nothing can be missing."""

    def description(self) -> dict[str, Any]:
        """Return the settings, and a hash of the first problems, which follows the code that writes them."""
        first = "".join(text for problem in _pairs(self, range(0, min(self.problems, 8))) for text in problem)
        options = {name: getattr(self, name) for name in ("split", "problems", "smallest", "largest", "seed")}
        return {"chains": options, "begins": hashlib.sha256(first.encode()).hexdigest()[:16]}

    def num_bytes(self) -> int:
        """Return the approximate size: a line has 6 characters of the problem and 15 of the solution."""
        return self.problems * 21 * (self.smallest + self.largest) // 2

    def stream(self) -> IterableDataset:
        """Stream the problems, some hundreds in a shard."""
        starts = list(range(0, self.problems, _PER_SHARD))
        return IterableDataset.from_generator(_rows, gen_kwargs={"source": self, "starts": starts})

    def read(self, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
        """Yield problem and solution of each row."""
        return ((row["prompt"], row["completion"]) for row in rows)


def _rows(source: ChainSource, starts: list[int]) -> Iterator[dict[str, str]]:
    for start in starts:
        for prompt, completion in _pairs(source, range(start, min(start + _PER_SHARD, source.problems))):
            yield {"prompt": prompt, "completion": completion}


def _pairs(source: ChainSource, numbers: range) -> Iterator[tuple[str, str]]:
    split = get_args(Split).index(source.split)
    for number in numbers:
        draw = np.random.default_rng([source.seed, split, number])
        problem = draw_problem(int(draw.choice(source.sizes)), draw, source.split)
        yield problem.prompt, problem.solution
