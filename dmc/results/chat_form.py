"""A conversation as a tokenizer's chat template writes it, cut where what is said begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARKS = ("FIRST-QUESTION", "FIRST-REPLY", "SECOND-QUESTION")


@dataclass(frozen=True)
class ChatForm:
    """What a template writes around the turns."""

    opening: str
    """Before what is said first; special tokens and a system prompt of the template included."""
    closing: str
    """Between what is said and the reply."""
    reopening: str
    """Between a reply and what is said next."""


def check_chat_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that does not know how conversations are written.

    Raises:
        ValueError: it has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"chat_template=true: the tokenizer {tokenizer.name_or_path!r} has no chat template, as those of base "
            "models; leave it false, or add chat_template.jinja to the folder"
        )


def read_chat_form(tokenizer: Any) -> ChatForm:
    """Let the template write a conversation of marks, and see what stands between them.

    Raises:
        ValueError: there is no template, or it leaves out or repeats what is said.
    """
    check_chat_template(tokenizer)
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    places = [text.find(mark) for mark in MARKS]
    if -1 in places or places != sorted(places) or any(text.count(mark) > 1 for mark in MARKS):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not write every turn once and in order: it cannot "
            "be used with chat_template=true"
        )
    first, reply, second = MARKS
    return ChatForm(
        opening=text.partition(first)[0],
        closing=text.partition(second)[2],
        reopening=text.partition(reply)[2].partition(second)[0],
    )
