"""Rows in which every pair of values of two parameters stands once at least, instead of their whole product."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

CANDIDATES = 20
"""Rows tried for each one that is taken: more make the list shorter, by little."""


def cover(*axes: Sequence[Any], allowed: Callable[..., bool] | None = None, seed: int = 0) -> list[tuple[Any, ...]]:
    """List rows that cover all pairs, for `pytest.mark.parametrize(("a", "b", "c"), cover(AS, BS, CS))`.

    Greedy, as AETG (Cohen et al., 1997): of some random rows, each begun with a pair that is missing and filled with
    the values that cover most, the best is taken. The same axes always give the same rows.

    Args:
        axes: the values of each parameter.
        allowed: says whether values, one of each axis, go together; a pair that no allowed row holds is left out.
        seed: of the random rows.

    Raises:
        ValueError: fewer than two axes, an axis without values, or no row is allowed.
    """
    if len(axes) < 2 or not all(axes):
        raise ValueError(f"expected two axes or more, each with values: {axes}")
    sizes = [range(len(axis)) for axis in axes]

    def values(row):
        return tuple(axis[index] for axis, index in zip(axes, row, strict=True))

    possible = None if allowed is None else [row for row in itertools.product(*sizes) if allowed(*values(row))]
    if possible == []:
        raise ValueError("no row is allowed")
    missing = _all_pairs(sizes) if possible is None else set().union(*map(_pairs, possible))
    generator, chosen = random.Random(seed), []
    while missing:
        order = sorted(missing)
        tried = [_filled(generator.choice(order), sizes, missing, generator, possible) for _ in range(CANDIDATES)]
        best = max(tried, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return [values(row) for row in sorted(chosen)]


def _pairs(row):
    return set(itertools.combinations(enumerate(row), 2))


def _all_pairs(sizes):
    axes = itertools.combinations(range(len(sizes)), 2)
    return {((a, i), (b, j)) for a, b in axes for i in sizes[a] for j in sizes[b]}


def _filled(pair, sizes, missing, generator, possible):
    """A row that holds a pair, and for its other axes, in random order, what covers most with what stands already."""
    if possible is not None:
        fitting = [row for row in possible if all(row[axis] == index for axis, index in pair)]
        sample = generator.sample(fitting, min(len(fitting), CANDIDATES))
        return max(sample, key=lambda row: len(_pairs(row) & missing))
    row = dict(pair)
    others = [axis for axis in range(len(sizes)) if axis not in row]
    for axis in generator.sample(others, len(others)):

        def gain(index, axis=axis):
            return sum(tuple(sorted(((axis, index), entry))) in missing for entry in row.items())

        row[axis] = max(generator.sample(sizes[axis], len(sizes[axis])), key=gain)
    return tuple(row[axis] for axis in range(len(sizes)))
