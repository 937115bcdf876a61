"""Prompts of text: encoded pieces of questions, and filler from a text that is repeated or a source of documents."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from jinja2 import TemplateError
from pydantic import Field

from dmc.data import DocumentSource, build_packed, framing_of
from dmc.results.tasks.base import spread
from dmc.special_tokens import tokens_before

Haystack = DocumentSource | Annotated[str, Field(pattern=r"\S")]
"""A source of documents, or a text that is repeated."""


class Encoder:
    """Encodes pieces of a prompt, one after the other.

    Args:
        tokenizer: the model's.
    Raises:
        ValueError: there is no tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ValueError("a task over text needs a tokenizer in the model's folder")
        self.tokenizer = tokenizer
        self.begin = list(tokens_before(tokenizer))
        """Special tokens before a text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a piece, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def conversation(self, roles: Sequence[str]) -> list[list[int]]:
        """Return the tokens around the messages of a conversation that the model answers: before, between, after them.

        Without a chat template: the special tokens before a text, and nothing.

        Raises:
            ValueError: the template does not take these roles.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return [self.begin, *([] for _ in roles)]
        marks = [f"message-{number}-here" for number in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the chat template takes no conversation of {', '.join(roles)}: {error}") from error
        pieces = re.split("|".join(marks), text)
        if len(pieces) != len(roles) + 1:
            raise ValueError(f"the chat template leaves out a message of {', '.join(roles)}")
        return [self.encode(piece) for piece in pieces]

    def ask(self, question: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the question and those of the answer's beginning, which end a prompt."""
        start = beginning_of_answer(question)
        return self.encode(question.removesuffix(start)), self.encode(start)

    def filler(self, haystack: Haystack, count: int, number: int, cache_folder: str) -> list[list[int]]:
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
        chosen = [windows[places[index % len(places)]]["input_ids"] for index in range(number)]
        return [torch.where(window == framing.end, line_end, window).tolist() for window in chosen]


def beginning_of_answer(question: str) -> str:
    """Return the text after the last question mark or line end."""
    return re.split(r"[?\n]", question)[-1]
