"""Prompts assembled from pieces of tokens, with a tokenizer's chat template around conversations."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import torch

from dmc.data import DocumentSource, build_packed, framing_of
from dmc.results.tasks.base import spread

MARKS = ("FIRST-QUESTION", "FIRST-REPLY", "SECOND-QUESTION")


class ChatForm(NamedTuple):
    """Texts that a chat template writes around the turns; empty without one."""

    opening: str = ""
    """Text before the first message, with special tokens and a system prompt of the template."""
    closing: str = ""
    """Text between a message and the reply."""
    reopening: str = ""
    """Text between a reply and the next message."""


def check_chat_template(tokenizer: Any) -> None:
    """Raise a ValueError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"chat_template=true: the tokenizer {tokenizer.name_or_path!r} has no chat template, like those of "
            "base models; set chat_template=false, or add chat_template.jinja to the folder"
        )


def read_chat_form(tokenizer: Any) -> ChatForm:
    """Find a template's texts by applying it to a conversation of marks.

    Raises:
        ValueError: there is no template, or it omits or repeats messages.
    """
    check_chat_template(tokenizer)
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=True)]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    pieces = re.split("|".join(MARKS), text)
    if re.findall("|".join(MARKS), text) != [*MARKS]:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not write every turn once and in order: it cannot "
            "be used with chat_template=true"
        )
    return ChatForm(opening=pieces[0], closing=pieces[3], reopening=pieces[2])


class Encoder:
    """Encodes pieces of a prompt, one after the other.

    Args:
        tokenizer: the model's.
        chat_template: whether to write its chat template around them.
    Raises:
        ValueError: there is no tokenizer, or it has no chat template to use.
    """

    def __init__(self, tokenizer: Any, chat_template: bool = False) -> None:
        if tokenizer is None:
            raise ValueError("a task over text needs a tokenizer in the model's folder")
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.form = read_chat_form(tokenizer) if chat_template else ChatForm()
        self.begin = self.encode(self.form.opening) if chat_template else list(tokenizer("")["input_ids"])
        """Tokens before a text: special tokens, or a template's opening."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a piece, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ask(self, question: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the question and those of the answer's beginning, which end a prompt."""
        start = beginning_of_answer(question)
        asked = question.removesuffix(start)
        if not self.chat_template:
            return self.encode(asked), self.encode(start)
        return self.encode(asked.rstrip()), self.encode(self.form.closing + start.lstrip())

    def converse(self, pieces: list[list[int]], question: str) -> list[list[int]]:
        """Return the turns of a conversation: one message for each piece, then the question."""
        closing, reopening = self.encode(self.form.closing), self.encode(self.form.reopening)
        asked, start = self.ask(question)
        said = [[*piece, *closing] for piece in pieces] + [[*asked, *start]]
        return [[*(reopening if turn else self.begin), *tokens] for turn, tokens in enumerate(said)]

    def filler(self, haystack: DocumentSource | str, count: int, number: int, cache_folder: str) -> list[list[int]]:
        """Return `number` windows of `count` tokens, evenly from a source, or from a repeated text.

        Line ends replace the ends of documents, where a model would stop.

        Raises:
            ValueError: the source has fewer than `count` tokens.
        """
        if isinstance(haystack, str):
            once = self.encode(haystack)
            return [(once * (count // len(once) + 1))[:count]] * number
        framing = dataclasses.replace(framing_of(self.tokenizer), begin=())
        windows: Any = build_packed(haystack, self.tokenizer, count, cache_folder, framing=framing)
        line_end = self.encode("\n")[-1]
        places = spread(number, len(windows))
        chosen = [windows[places[each % len(places)]]["input_ids"] for each in range(number)]
        return [torch.where(each == framing.end, line_end, each).tolist() for each in chosen]


def beginning_of_answer(question: str) -> str:
    """Return the text after the last question mark or line end."""
    return re.split(r"[?\n]", question)[-1]
