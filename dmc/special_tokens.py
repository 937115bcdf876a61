"""Special tokens that begin a prompt or document, and those that end what a model generates."""

from __future__ import annotations

from typing import Any


def tokens_before(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text."""
    token_ids, alone = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    for start in range(len(token_ids) - len(alone) + 1):
        if token_ids[start : start + len(alone)] == alone:
            return tuple(token_ids[:start])
    return ()


def encode_text(tokenizer: Any, text: str, begins_text: bool) -> list[int]:
    """Encode a text that something follows: a model continues no text that has ended.

    Args:
        tokenizer: any tokenizer, which may end each text too (`add_eos_token`).
        text: the text.
        begins_text: whether special tokens come before it, once, also where the text itself says them.
    """
    tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    before = list(tokens_before(tokenizer)) if begins_text else []
    return tokens if tokens[: len(before)] == before else before + tokens


def ends_of_text(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a generation; empty: none, whatever the tokenizer says.

    The tokenizer's eos token is one of them: the end of a turn is often named there alone, and a model would go on.

    Args:
        generation_config: the model's.
        tokenizer: the model's; None: it has none.
    """
    configured = generation_config.eos_token_id
    given = configured if isinstance(configured, list) else [configured]
    ends = [token for token in given if token is not None and token >= 0]
    own = getattr(tokenizer, "eos_token_id", None)
    return [*ends, own] if ends and own is not None and own not in ends else ends
