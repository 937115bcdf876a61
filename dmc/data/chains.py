"""Problems with solutions that are written out step by step: training and evaluation data for reasoning.

A problem is a tree with weighted edges, listed in random order, and a target. Asked is for the node whose path from the
root sums up to the target; there is one. The solution searches from the root, depth first, and tracks back:

    ?a=07|ab3,ad1,de6,          root a, target 07; edges: parent, child, weight
    a<.00ab3ad1a                node < its parent, sum of the path, edges to children left to try, in random order
    b<a03b                      the first of them; it has none
    a<.00-b3ad1a                back: - the child and weight that are done with, edges that are left
    d<a01de6d
    e<d07=e                     the sum is the target: = answer

Every line needs what stands far back: the edges in the problem, the target, an earlier line of the same node. Each item
of a list begins with the node's own name, and so does its end: what comes next is what followed that name elsewhere.

Which child comes first is chance, for the writer of the training data and for a model that samples. A solution of
limited length is right if it comes to the answer in time, and several solutions of a problem search in several orders.
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
"""Names of nodes."""
MOST_CHILDREN = 3
SEPARATORS = (" ", ",", ";", "/")
LAYOUTS = ("?{root}={target}|{edges}\n", "{edges}|?{root}={target}\n", "?{target}={root}|{edges}\n")
"""Forms of problems; an edge ends with the separator."""
UNSEEN = {(0, 3), (1, 2), (2, 1)}
"""Layouts and separators that no training shows together."""
HELD_OUT_SIZES = (12, 20, 28, 36, 44)
"""Numbers of nodes that no training shows."""
ANSWER = re.compile(r"=([a-zA-Z])$")
_PER_SHARD = 256  # problems that are drawn from one seed

Forms = Literal["seen", "unseen"]


@dataclass(frozen=True)
class Problem:
    """A tree and a target; node 0 is the root."""

    names: str
    """One letter for each node."""
    parents: tuple[int, ...]
    """Parent of each node, -1 of the root; it comes before its children."""
    weights: tuple[int, ...]
    """Weight of the edge from each node's parent, 1 to 9; 0 of the root."""
    goal: int
    """The node that is asked for."""
    prompt: str
    """The problem as text."""

    @cached_property
    def sums(self) -> list[int]:
        """Sum of the weights from the root to each node."""
        found: list[int] = []
        for parent, weight in zip(self.parents, self.weights, strict=True):
            found.append(weight + (found[parent] if parent >= 0 else 0))
        return found

    @cached_property
    def paths(self) -> list[str]:
        """Weights from the root to each node, sorted: the same for trees that differ in their nodes' order alone."""
        found: list[str] = []
        for parent, weight in zip(self.parents, self.weights, strict=True):
            found.append(f"{found[parent]}{weight}" if parent >= 0 else "")
        return sorted(found)

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of each node."""
        found: list[list[int]] = [[] for _ in self.parents]
        for child, parent in enumerate(self.parents[1:], 1):
            found[parent].append(child)
        return found

    def solve(self, draw: np.random.Generator) -> str:
        """Search for the goal, children in random order, and write each step down."""
        left = [[int(child) for child in draw.permutation(children)] for children in self.children]
        lines, node, finished = list[str](), 0, ""
        while node != self.goal:
            name = self.names[node]
            edges = "".join(f"{name}{self._named(child)}" for child in left[node])
            lines.append(f"{self._line(node)}{finished}{edges}{name}")
            finished = "" if left[node] else f"-{self._named(node)}"
            node = left[node].pop(0) if left[node] else self.parents[node]
        return "\n".join([*lines, f"{self._line(node)}={self.names[node]}"])

    def repeat(self, draw: np.random.Generator) -> str:
        """Write the edges again, in their order and then in two others: a lesson in finding what a node leads to."""
        edges = re.findall("[a-zA-Z]{2}[0-9].", self.prompt)
        orders = [np.arange(len(edges)), *(draw.permutation(len(edges)) for _ in range(2))]
        return "".join(edges[index] for order in orders for index in order)

    def is_right(self, answer: str | None) -> bool:
        """Return whether an answer names a node whose path sums up to the target."""
        if answer is None or answer not in self.names:
            return False
        return self.sums[self.names.index(answer)] == self.sums[self.goal]

    def _named(self, node: int) -> str:
        return f"{self.names[node]}{self.weights[node]}"

    def _line(self, node: int) -> str:
        parent = "." if node == 0 else self.names[self.parents[node]]
        return f"{self.names[node]}<{parent}{self.sums[node]:02d}"


def answer_of(solution: str) -> str | None:
    """Return the answer at the end of a solution; None: it has not come to one."""
    found = ANSWER.search(solution)
    return None if found is None else found[1]


def draw_problem(size: int, draw: np.random.Generator, split: Split, forms: Forms = "seen") -> Problem:
    """Draw a problem of a split: by a hash of tree and target, whatever the letters, the form and the order.

    Args:
        size: number of nodes.
        draw: source of randomness.
        split: see `split_of`.
        forms: whether it is written in a form that occurs in training.
    """
    while True:
        parents, weights = _draw_tree(size, draw), [0, *draw.integers(1, 10, size=size - 1).tolist()]
        tree = Problem("", tuple(parents), tuple(weights), 0, "")
        goals = [node for node in range(1, size) if tree.sums.count(tree.sums[node]) == 1 and tree.sums[node] < 100]
        if not goals:
            continue
        goal = int(draw.choice(goals))
        if split_of(f"{tree.paths} {tree.sums[goal]}") != split:
            continue
        names = "".join(draw.permutation(list(NAMES))[:size])
        prompt = _written(tree, names, tree.sums[goal], draw, forms)
        return Problem(names, tree.parents, tree.weights, goal, prompt)


def _draw_tree(size: int, draw: np.random.Generator) -> list[int]:
    """Draw a parent for each node, among those before it that have room for a child."""
    parents, num_children = [-1], [0] * size
    for node in range(1, size):
        room = [other for other in range(node) if num_children[other] < MOST_CHILDREN]
        parents.append(room[int(draw.integers(len(room)))])
        num_children[parents[-1]] += 1
    return parents


def _written(tree: Problem, names: str, target: int, draw: np.random.Generator, forms: Forms) -> str:
    written = [
        (layout, separator)
        for layout in range(len(LAYOUTS))
        for separator in range(len(SEPARATORS))
        if ((layout, separator) in UNSEEN) == (forms == "unseen")
    ]
    layout, separator = written[int(draw.integers(len(written)))]
    edges = [
        f"{names[parent]}{names[child]}{weight}{SEPARATORS[separator]}"
        for child, (parent, weight) in enumerate(zip(tree.parents, tree.weights, strict=True))
        if child
    ]
    shuffled = "".join(edges[index] for index in draw.permutation(len(edges)))
    return LAYOUTS[layout].format(root=names[0], target=f"{target:02d}", edges=shuffled)


@dataclass(frozen=True)
class ChainSource(DocumentSource):
    """Problems with one solution each, of which the solutions are trained on; a function of split and seed."""

    split: Split = "train"
    problems: int = 1000
    """Number of problems."""
    smallest: int = 4
    """Nodes of the smallest problem."""
    largest: int = 46
    """Nodes of the largest problem."""
    lesson: bool = False
    """Whether the edges are repeated instead of a solution, see `Problem.repeat`."""
    seed: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.split not in get_args(Split):
            raise ValueError(f"split={self.split!r} is unknown; choose one of {list(get_args(Split))}.")
        if not 2 <= self.smallest <= self.largest <= len(NAMES):
            raise ValueError(
                f"smallest={self.smallest}, largest={self.largest}: expected 2 <= smallest <= largest <= {len(NAMES)}"
            )
        if not self.sizes or self.problems < 1:
            raise ValueError(f"problems={self.problems} of sizes {self.sizes}: expected at least one of each")
        super().__post_init__()

    @property
    def sizes(self) -> list[int]:
        """Numbers of nodes, without those that training does not show."""
        return [size for size in range(self.smallest, self.largest + 1) if size not in HELD_OUT_SIZES]

    @property
    def label(self) -> str:
        """For messages and file names."""
        return f"chains:{self.split}{':lesson' if self.lesson else ''}"

    @property
    def has_loss_mask(self) -> bool:
        """Solutions are trained on, problems are not."""
        return True

    def check(self) -> None:
        """Nothing can be missing."""

    def description(self) -> dict[str, Any]:
        """Return the settings, and a hash of the first problems, which follows the code that writes them."""
        first = "".join(text for problem in _pairs(self, range(0, min(self.problems, 8))) for text in problem)
        options = {name: getattr(self, name) for name in ("split", "problems", "smallest", "largest", "lesson", "seed")}
        return {"chains": options, "begins": hashlib.sha256(first.encode()).hexdigest()[:16]}

    def num_bytes(self) -> int:
        """Return the approximate size: a node has an edge of 4 characters, and half of some 20 of a solution."""
        return self.problems * 14 * (self.smallest + self.largest) // 2

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
        yield problem.prompt, problem.repeat(draw) if source.lesson else problem.solve(draw)
