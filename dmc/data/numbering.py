"""Whether a tokenizer numbers its tokens as a model does, by the model's size, its own tokenizer and its configuration.

A model reads numbers: a tokenizer that gives other ones makes it read another text, without any error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dmc.data.tokenizer import ENDS_OF_TEXTS, ENDS_OF_TURNS

ENDS = {*ENDS_OF_TEXTS, *ENDS_OF_TURNS}
ROLES = ("bos", "eos", "pad")
_FILES = re.compile("tokenizer|vocab|merges|spiece|sentencepiece")


def has_tokenizer(model: str) -> bool:
    """Return whether a folder holds a tokenizer; a name on the hub counts as having one."""
    folder = Path(model)
    return not folder.is_dir() or any(_FILES.match(path.name) for path in folder.iterdir() if path.is_file())


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the words a model needs for a tokenizer: its largest token id and one, for ids may leave gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def excess_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> str | None:
    """Say that a tokenizer has more token ids than a model has words; None: it has not, or nobody knows the words."""
    if vocab_size is None or num_ids(tokenizer) <= vocab_size:
        return None
    return f"it has token ids up to {num_ids(tokenizer) - 1}, the model knows only {vocab_size} tokens"


def moved_token(tokenizer: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> str | None:
    """Say which token has another id than in a model's own tokenizer; None: all that both know have the same.

    Tokens may be added, and special ones renamed, as those are that a model reserves.
    """
    numbers, theirs = tokenizer.get_vocab(), own.get_vocab()
    for token, number in sorted(numbers.items(), key=lambda item: item[1]):
        if theirs.get(token, number) != number:
            return f"it numbers {token!r} {number}, the model's own numbers it {theirs[token]}"
    tokens, special = {number: token for token, number in numbers.items()}, _special_ids(own)
    for token, number in sorted(theirs.items(), key=lambda item: item[1]):
        if number not in special and tokens.get(number, token) != token:
            return f"its token {number} is {tokens[number]!r}, that of the model's own is {token!r}"
    return None


def moved_special_token(tokenizer: PreTrainedTokenizerBase, config: Any) -> str | None:
    """Say which special token of a model's configuration has another id in a tokenizer; None: none has.

    A configuration may name another end than the tokenizer does: one ends texts, one turns of a conversation.
    """
    tokens, special = {number: token for token, number in tokenizer.get_vocab().items()}, _special_ids(tokenizer)
    for role in ROLES:
        said = getattr(config, f"{role}_token_id", None)
        own = getattr(tokenizer, f"{role}_token_id")
        fitting = {own, *(special if own is None or role == "pad" else ())}
        if role == "eos":
            fitting |= {number for number in special if tokens.get(number) in ENDS}
        if (numbers := _numbers(said)) and not fitting.intersection(numbers):
            return (
                f"the model's config.json says {role}_token_id={said}, which is its {tokens.get(numbers[0])!r}, and "
                f"its {role} token has the id {own}"
            )
    return None


def _numbers(value: int | Sequence[int] | None) -> list[int]:
    found = [value] if isinstance(value, int) else list(value or ())
    return [number for number in found if number >= 0]  # some configurations say -1 for none


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
