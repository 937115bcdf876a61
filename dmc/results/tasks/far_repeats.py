"""Tokens for which memory matters: they repeat what was last said far back."""

from __future__ import annotations

from collections.abc import Sequence


def far_repeats(tokens: Sequence[int], ngram: int, distance: int) -> list[int]:
    """Find the tokens that end an n-gram whose last earlier occurrence is far back.

    Args:
        tokens: a text.
        ngram: tokens that repeat, the found one the last of them, >= 1.
        distance: at least so many tokens lie from the end of the earlier occurrence to the found token.
    Returns:
        Their positions, ascending.
    """
    last: dict[tuple[int, ...], int] = {}
    found = []
    for end in range(ngram - 1, len(tokens)):
        words = tuple(tokens[end - ngram + 1 : end + 1])
        if words in last and end - last[words] >= distance:
            found.append(end)
        last[words] = end
    return found
