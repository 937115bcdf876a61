"""Conversion of prompts to tokens."""

from __future__ import annotations

from typing import Any

from dmc.runtime.arguments import index_of, listed


def encode(prompt: str | list[int], tokenizer: Any, vocab_size: int, begins_text: bool) -> list[int]:
    """Turn a prompt into token ids that the model knows.

    Args:
        prompt: text or token ids.
        tokenizer: tokenizer for text, or None.
        vocab_size: ids must be below it.
        begins_text: whether the tokenizer adds its special tokens.
    Raises:
        ValueError: the prompt is empty, text without a tokenizer, or names tokens out of range.
        TypeError: it is neither text nor token ids.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text was given, but the engine has no tokenizer: pass tokenizer=, or token ids")
        prompt = tokenizer(prompt, add_special_tokens=begins_text)["input_ids"]
    given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # one copy of a tensor, not one per token
    tokens = []
    for token in listed("a prompt or continuation", given, "token ids, or a text"):
        if (index := index_of(token)) is None:
            raise TypeError(
                f"a prompt or continuation has {token!r} in it: expected token ids, which are whole numbers"
            )
        tokens.append(index)
    if not tokens:
        raise ValueError("a prompt or continuation is empty: give at least one token")
    # an index out of range in the embedding makes the GPU unusable for this process
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(
            f"tokens from {min(tokens)} to {max(tokens)} were given: the model knows 0 to {vocab_size - 1}"
        )
    return tokens
