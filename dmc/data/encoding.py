"""Encode documents as token ids with framing tokens, and a mask of the tokens to train on."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dmc.data.sources import Chat, Document
from dmc.data.tokenizer import Framing

logger = logging.getLogger(__name__)
_MARKS = re.compile("\ufdd0([0-9]+)\ufdd1")  # two code points that Unicode leaves out of texts
_MAX_PIECE = 2**20  # characters encoded in one call; encoders need memory of many times the text


@dataclass(frozen=True)
class Encoded:
    """Token ids of a document with its framing; empty for a document without text."""

    token_ids: np.ndarray
    scored: np.ndarray | None = None
    """Whether each token is trained on; None: all are."""
    refusal: str = ""
    """Reason why the tokenizer's chat template refused a chat."""


EMPTY = Encoded(np.empty(0, dtype=np.int32), np.empty(0, dtype=bool))


@dataclass
class Refusals:
    """How many chats of a source the chat template has refused."""

    label: str
    num_chats: int = 0
    num_refused: int = 0
    first: str = ""
    """Number and reason of the first."""

    def add(self, encoded: Encoded) -> None:
        """Count a chat, and warn of the first that is refused."""
        if encoded.refusal and not self.num_refused:
            self.first = f"chat {self.num_chats}: {encoded.refusal}"
            logger.warning(
                "%s: chats that the chat template refuses are left out, the first is %s", self.label, self.first
            )
        self.num_refused += bool(encoded.refusal)
        self.num_chats += 1

    def check(self) -> None:
        """Raise ValueError if more than a tenth is refused."""
        if self.num_refused > self.num_chats / 10:
            raise ValueError(
                f"{self.label!r}: the chat template refuses {self.num_refused} of {self.num_chats} chats, more than a "
                f"tenth; the first is {self.first}"
            )


@dataclass
class DocumentEncoder:
    """Encodes texts, chats, and prompts with their completions.

    In a chat only the assistant's turns are trained on: what the template marks as `{% generation %}`, or, without such
    marks, what it renders between the header of a turn and its end. Of a prompt and completion, the completion and
    separator are.
    """

    tokenizer: PreTrainedTokenizerBase
    framing: Framing

    def __call__(self, documents: Sequence[Document]) -> list[Encoded]:
        """Encode documents in one parallel batch, each framed; those without text or refused give no tokens.

        Raises:
            ValueError: the tokenizer has no chat template, or does not return the offsets of tokens.
        """
        encoded = [self._chat(document) if isinstance(document, list) else EMPTY for document in documents]
        texts = {number: text for number, text in enumerate(documents) if isinstance(text, str) and _is_text(text)}
        for number, token_ids in zip(texts, encode_documents(self.tokenizer, list(texts.values())), strict=True):
            if token_ids:
                encoded[number] = self._framed(token_ids)
        for number, parts in enumerate(documents):
            if isinstance(parts, tuple):
                answered = parts[: len(parts) // 2 * 2]  # without a last prompt, which may be empty
                encoded[number] = self._in_turn(parts) if all(map(_is_text, answered)) else EMPTY
        return encoded

    def _framed(self, token_ids: Sequence[int]) -> Encoded:
        return Encoded(np.array([*self.framing.begin, *token_ids, self.framing.end], dtype=np.int32))

    def _in_turn(self, parts: Sequence[str]) -> Encoded:
        """Encode texts of which every second is learned, tokens that end in it; the end, if the last one is."""
        encoded = self._with_offsets("".join(parts))
        ends = np.cumsum([len(part) for part in parts])
        places = np.searchsorted(ends, [stop - 1 for _, stop in encoded["offset_mapping"]], side="right")
        learned = (places % 2 == 1).tolist()
        framed = self._framed(encoded["input_ids"])
        return Encoded(framed.token_ids, np.array([False] * len(self.framing.begin) + [*learned, len(parts) % 2 == 0]))

    def _chat(self, messages: Chat) -> Encoded:
        if not all(isinstance(message, dict) for message in messages):
            return dataclasses.replace(EMPTY, refusal="a message is no mapping of role and content")
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if not any(message.get("role") == "assistant" for message in messages):
            return EMPTY
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no chat template: use an instruct model's, or "
                "columns of prompt, completion."
            )
        try:
            marked = "{% generation" in str(template) or "{%- generation" in str(template)
            token_ids, learned = self._marked(messages) if marked else self._found(messages)
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # a row may hold anything
            return dataclasses.replace(EMPTY, refusal=str(error) or type(error).__name__)
        begin, end = list(self.framing.begin), self.framing.end
        if token_ids[: len(begin)] != begin:
            token_ids, learned = begin + token_ids, [False] * len(begin) + learned
        if token_ids[-1] != end:
            token_ids, learned = [*token_ids, end], [*learned, False]
        return Encoded(np.array(token_ids, dtype=np.int32), np.array(learned, dtype=bool))

    def _marked(self, messages: Chat) -> tuple[list[int], list[bool]]:
        encoded = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [bool(learned) for learned in encoded["assistant_masks"]]

    def _found(self, messages: Chat) -> tuple[list[int], list[bool]]:
        """Find the assistant's turns in the rendered chat, of which the template may have left out or added parts."""
        text, spans = self._render(messages), self._spans(messages)
        encoded = self._with_offsets(text)
        learned = [
            any(start < end and stop > begin for begin, end in spans) for start, stop in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), learned

    def _spans(self, messages: Chat) -> list[tuple[int, int]]:
        """Return begin and end of each of the assistant's turns in the rendered chat, with what ends a turn.

        A turn begins behind the template's header. A mark in the text, rendered along with it, tells where it ends.
        """
        header, footer = self._turn
        marked = [{**message, "content": _with_mark(message["content"], n)} if _says(message) else message
                  for n, message in enumerate(messages)]  # fmt: skip
        text, ends = "", {}
        for place, piece in enumerate(_MARKS.split(self._render(marked))):
            if place % 2:
                ends[int(piece)] = len(text)
            else:
                text += piece
        if text != self._render(messages):
            raise ValueError("it renders the assistant's turns by how they end, so that they cannot be found")
        spans, place = [], 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                if header.strip() in str(message.get("content")):
                    raise ValueError(f"message {number} holds {header.strip()!r}, which begins a turn of the assistant")
                continue
            begin = text.find(header, place, ends.get(number))
            if begin < 0 or (_says(message) and number not in ends):
                raise ValueError(f"message {number}, of the assistant, cannot be found in what it renders")
            begin += len(header)
            place = text.find(footer, ends.get(number, begin))
            if place < 0:
                raise ValueError(f"message {number}, of the assistant, has no end in what it renders")
            place += len(footer)
            spans.append((begin, place))
        return spans

    @cached_property
    def _turn(self) -> tuple[str, str]:
        """The template's text before and after what the assistant says, taken from chats that are made up."""
        asked, answered, again = "\ufdd0q", "\ufdd0a", "\ufdd0f"  # as in no template
        user, assistant = {"role": "user", "content": asked}, {"role": "assistant", "content": answered}
        alone, prompted = (self._render([user], add_generation_prompt=prompts) for prompts in (False, True))
        short = self._render([user, assistant])
        long = self._render([user, assistant, {"role": "user", "content": again}])
        behind_user = alone.rpartition(asked)[2]
        between = [text.rpartition(asked)[2].rpartition(answered)[0] for text in (short, long)]
        opening = _common_start(*between, prompted.rpartition(asked)[2])
        header = opening.removeprefix(_common_start(opening, behind_user))
        header = header if header.strip() else opening
        if not header.strip():
            raise ValueError("it does not tell the assistant's turns from others: mark them with {% generation %}")
        footer = _common_start(short.rpartition(answered)[2], long.rpartition(answered)[2].rpartition(again)[0])
        return header, footer

    def _render(self, messages: Chat, **options: bool) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _with_offsets(self, text: str) -> Any:
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path!r} is not fast (tokenizer.json): it has no offsets."
            )
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)


def _says(message: dict[str, Any]) -> bool:
    """Return whether a message holds text of the assistant."""
    content = message.get("content")
    return message.get("role") == "assistant" and isinstance(content, str) and bool(content.strip())


def _common_start(*texts: str) -> str:
    same = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _with_mark(text: str, number: int) -> str:
    """Put a mark behind the last letter of a text, where a template strips nothing."""
    length = len(text.rstrip())
    return f"{text[:length]}\ufdd0{number}\ufdd1{text[length:]}"


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts in one parallel batch, without special tokens.

    A text of more than 2**20 characters is encoded in pieces cut at line ends; a token that would span a cut is split.

    Returns:
        One list of token ids per text.
    """
    pieces = [(number, piece) for number, text in enumerate(texts) for piece in _pieces(text)]
    documents: list[list[int]] = [[] for _ in texts]
    if pieces:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = tokenizer([piece for _, piece in pieces], **options)
        for (number, _), token_ids in zip(pieces, encoded["input_ids"], strict=True):
            documents[number] += token_ids
    return documents


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _MAX_PIECE:
        line_end = text.rfind("\n", start, start + _MAX_PIECE)
        stop = start + _MAX_PIECE if line_end <= start else line_end
        yield text[start:stop]
        start = stop
    yield text[start:]


def _is_text(text: str) -> bool:
    """Return whether a value is text that tokenizers accept: json can contain halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return bool(text.strip())
