"""Encode documents as token ids with framing tokens, and a mask of the tokens to train on."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

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
class DocumentEncoder:
    """Encodes texts, chats, and prompts with their completions.

    In a chat only the assistant's turns are trained on: the text that the template marks as `{% generation %}`, or,
    without marks, the text after the generation prompt. Of a prompt and completion, the completion and separator are.
    """

    tokenizer: PreTrainedTokenizerBase
    framing: Framing
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of chats of each source that the template refused; a warning comes whenever it gains a digit."""
    refusal: str = ""
    """The last reason."""

    def __call__(self, documents: Sequence[Document], label: str = "") -> list[Encoded]:
        """Encode documents in one parallel batch, each framed; those without text or refused give no tokens.

        Args:
            documents: of one source.
            label: that of the source, whose refused chats are counted; none are without.
        Raises:
            ValueError: the tokenizer has no chat template, or does not return the offsets of tokens.
        """
        found = [self._chat(each) if isinstance(each, list) else EMPTY for each in documents]
        texts = {number: text for number, text in enumerate(documents) if isinstance(text, str) and _is_text(text)}
        for number, token_ids in zip(texts, encode_documents(self.tokenizer, list(texts.values())), strict=True):
            if token_ids:
                found[number] = self._framed(token_ids)
        for number, pair in enumerate(documents):
            if isinstance(pair, tuple) and all(map(_is_text, pair)):
                found[number] = self._pair(*pair)
        for reason in (each.refusal for each in found if label and each.refusal):
            self.refused[label], self.refusal = self.refused[label] + 1, reason
            if math.log10(self.refused[label]).is_integer():
                told = label, self.refused[label], reason
                logger.warning("%s: skipped %d chats so far, which the chat template refuses: %s", *told)
        return found

    def _framed(self, token_ids: Sequence[int]) -> Encoded:
        return Encoded(np.array([*self.framing.begin, *token_ids, self.framing.end], dtype=np.int32))

    def _pair(self, prompt: str, completion: str) -> Encoded:
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path!r} is not fast (tokenizer.json): it has no offsets."
            )
        encoded = self.tokenizer(prompt + completion, add_special_tokens=False, return_offsets_mapping=True)
        learned = [stop > len(prompt) for _, stop in encoded["offset_mapping"]]
        framed = self._framed(encoded["input_ids"])
        return Encoded(framed.token_ids, np.array([False] * len(self.framing.begin) + [*learned, True]))

    def _chat(self, messages: Chat) -> Encoded:
        if not all(isinstance(each, dict) for each in messages):
            return dataclasses.replace(EMPTY, refusal="a message is no mapping of role and content")
        messages = [{key: value for key, value in each.items() if value is not None} for each in messages]
        if not any(each.get("role") == "assistant" for each in messages):
            return EMPTY
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no chat template: use an instruct model's, or "
                "columns of prompt, completion."
            )
        try:
            marked = "{% generation" in str(template) or "{%- generation" in str(template)
            token_ids, learned = self._marked(messages) if marked else self._followed(messages)
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
        return list(encoded["input_ids"]), [bool(each) for each in encoded["assistant_masks"]]

    def _followed(self, messages: Chat) -> tuple[list[int], list[bool]]:
        """Find each answer as the difference between the chat before it, with the generation prompt, and after it."""

        def encode(count: int, prompts: bool = False) -> list[int]:
            encoded = self.tokenizer.apply_chat_template(
                messages[:count], return_dict=True, add_generation_prompt=prompts
            )
            return list(encoded["input_ids"])

        token_ids = encode(len(messages))
        learned = [False] * len(token_ids)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, behind = encode(number, prompts=True) if number else [], encode(number + 1)
            if token_ids[: len(before)] != before or token_ids[: len(behind)] != behind:
                raise ValueError(
                    "it rewrites earlier turns; mark the assistant's turns with {% generation %}, so that they can be "
                    "told apart"
                )
            learned[len(before) : len(behind)] = [True] * (len(behind) - len(before))
        return token_ids, learned


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
