"""Encode documents as token ids with framing tokens, and a mask of the tokens to train on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dmc.data.chats import ChatTemplate, encode_with_offsets
from dmc.data.sources import Chat, Document
from dmc.data.tokenizer import Framing

logger = logging.getLogger(__name__)
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

    In a chat only the assistant's turns are trained on, with what ends them, see `ChatTemplate`. So is the end of the
    document, where no special token ends the last turn. Of a prompt and completion, the completion and separator are.
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
        encoded = encode_with_offsets(self.tokenizer, "".join(parts))
        ends = np.cumsum([len(part) for part in parts])
        places = np.searchsorted(ends, [stop - 1 for _, stop in encoded["offset_mapping"]], side="right")
        learned = (places % 2 == 1).tolist()
        framed = self._framed(encoded["input_ids"])
        return Encoded(framed.token_ids, np.array([False] * len(self.framing.begin) + [*learned, len(parts) % 2 == 0]))

    def _chat(self, messages: Chat) -> Encoded:
        if not all(isinstance(message, dict) for message in messages):
            return dataclasses.replace(EMPTY, refusal="a message is no mapping of role and content")
        if not any(message.get("role") == "assistant" for message in messages):
            return EMPTY
        template = self._template
        try:
            token_ids, learned = template.encode(messages)
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # a row may hold anything
            return dataclasses.replace(EMPTY, refusal=str(error) or type(error).__name__)
        begin, end = list(self.framing.begin), self.framing.end
        if token_ids[-1:] != [end]:
            ends_turn = learned[-1:] == [True] and not template.closes(token_ids, learned)
            token_ids, learned = [*token_ids, end], [*learned, ends_turn]
        if token_ids[: len(begin)] != begin:
            token_ids, learned = begin + token_ids, [False] * len(begin) + learned
        return Encoded(np.array(token_ids, dtype=np.int32), np.array(learned, dtype=bool))

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)


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
