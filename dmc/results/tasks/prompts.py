"""Prompts put together of pieces: token ids, and what a tokenizer's chat template writes around a conversation."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import torch

from dmc.data import DocumentSource, build_packed, framing_of
from dmc.results.tasks.base import spread

MARKS = ("FIRST-QUESTION", "FIRST-REPLY", "SECOND-QUESTION")


class ChatForm(NamedTuple):
    """What a template writes around the turns; nothing without one."""

    opening: str = ""
    """Before what is said first; special tokens and a system prompt of the template included."""
    closing: str = ""
    """Between what is said and the reply."""
    reopening: str = ""
    """Between a reply and what is said next."""


def check_chat_template(tokenizer: Any) -> None:
    """Raise a ValueError for a tokenizer that does not know how conversations are written."""
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
    pieces = re.split("|".join(MARKS), text)
    if re.findall("|".join(MARKS), text) != [*MARKS]:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not write every turn once and in order: it cannot "
            "be used with chat_template=true"
        )
    return ChatForm(opening=pieces[0], closing=pieces[3], reopening=pieces[2])


class Encoder:
    """Turns pieces of a prompt into tokens, one after the other.

    Args:
        tokenizer: the model's.
        chat_template: whether its chat template is written around them.
    Raises:
        ValueError: there is no tokenizer, or it has no chat template to use.
    """

    def __init__(self, tokenizer: Any, chat_template: bool = False) -> None:
        if tokenizer is None:
            raise ValueError("a task over text needs a tokenizer in the model's folder")
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.form = read_chat_form(tokenizer) if chat_template else ChatForm()
        self.begin = self.encode(self.form.opening) if chat_template else list(tokenizer("")["input_ids"])
        """What stands before a text: special tokens, or a template's opening."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a piece, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def ask(self, question: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the end of a prompt: of the question, and of the answer's beginning."""
        start = beginning_of_answer(question)
        asked = question.removesuffix(start)
        if not self.chat_template:
            return self.encode(asked), self.encode(start)
        return self.encode(asked.rstrip()), self.encode(self.form.closing + start.lstrip())

    def converse(self, pieces: list[list[int]], question: str) -> list[list[int]]:
        """Return the turns of a conversation: pieces that are said one after the other, then the question."""
        closing, reopening = self.encode(self.form.closing), self.encode(self.form.reopening)
        asked, start = self.ask(question)
        said = [[*piece, *closing] for piece in pieces] + [[*asked, *start]]
        return [[*(reopening if turn else self.begin), *tokens] for turn, tokens in enumerate(said)]

    def filler(self, haystack: DocumentSource | str, count: int, number: int, cache_folder: str) -> list[list[int]]:
        """Return `number` windows of `count` tokens: from all over a source, or of a text that is repeated.

        Line ends stand for the ends of documents, where a model would stop.

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
    """Return what stands behind the last question mark or line end."""
    return re.split(r"[?\n]", question)[-1]
