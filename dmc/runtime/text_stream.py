"""Incremental detokenization after a prompt: never half a character, nothing of a stop string.

The `DecodeStream` of tokenizers joins emoji and keeps first spaces too. It never gives what is left of half a character
(`test_half_a_character_waits_for_its_other_half_or_the_end`, `test_any_tokens_make_up_what_the_tokenizer_decodes`), and
decodes token by token, with fast tokenizers alone (`test_text_is_decoded_where_it_is_asked_for_in_any_order`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

UNFINISHED = "\ufffd"
FIRST_CONTEXT = 8
"""Last tokens of a prompt that are decoded with the new ones; more where these have no text, or begin in a character.
"""
CHARACTER_TOKENS = 4
"""Most tokens that share one character: UTF-8 has up to four bytes."""
CLEANED = 6
"""Last characters among which a clean-up of spaces may remove one when the next token comes, as in "do n ' t"."""


class PromptEnd:
    """The last tokens of a prompt: with them, new tokens are decoded as behind all of it.

    Args:
        tokenizer: Hugging Face tokenizer.
        prompt: all tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self.tokens = tokenizer, prompt

    @cached_property
    def decoded(self) -> tuple[list[int], str]:
        """The tokens, and their text."""
        count = FIRST_CONTEXT
        while True:
            tokens = [*self.tokens[-count:]]
            text = decode(self._tokenizer, tokens)
            if count >= len(self.tokens) or (text.strip() and not text.startswith(UNFINISHED)):
                return tokens, text
            count *= 4

    @cached_property
    def parts(self) -> tuple[list[int], list[int], str]:
        """Tokens whose text is final, those that begin a character, and what the tokenizer writes for these."""
        tokens, text = self.decoded
        for size in range(1, CHARACTER_TOKENS) if text.endswith(UNFINISHED) else ():
            before = decode(self._tokenizer, tokens[:-size])
            if not before.endswith(UNFINISHED):
                return tokens[:-size], tokens[-size:], decode(self._tokenizer, tokens[-size:])
        return tokens, [], ""


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Decode tokens as texts are: without special ones."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def common_length(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


class TextStream:
    """Detokenizes one continuation as it grows, with any tokenizer that has `decode`; or later, when it is asked.

    Its text is what the new tokens add to the text of the prompt. A tokenizer may strip the space before the first
    token that it decodes, so the tokens of the last piece are decoded again as context.

    Args:
        tokenizer: Hugging Face tokenizer.
        stop: strings before which the text ends, also if several tokens form one.
        prompt: tokens before the continuation; without any, its first token begins the text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop, self._prompt = tokenizer, stop, PromptEnd(tokenizer, prompt)
        self._context: list[int] | None = None
        self._unsettled: list[int] = []
        self._unsettled_text = ""
        self._shown = ""
        self._num_given = 0  # characters of the unsettled tokens' text that are released
        self._held = ""
        self._length = 0
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._is_finished = False
        self._lock = threading.Lock()
        self.pieces: list[str] = []
        """The text so far, as tokens have made it final."""
        self.stopped = False
        """Whether a stop string was met."""

    def another(self) -> TextStream:
        """Return a stream for another continuation of the prompt, with nothing added yet."""
        other = TextStream(self._tokenizer, self._stop)
        other._prompt = self._prompt
        return other

    def add(self, token: int) -> None:
        """Append a token without decoding it."""
        self._tokens.append(token)

    def text_of(self, index: int, is_last: bool) -> str:
        """Return what `push` and, of the last token, `finish` give for the token of this index, in any thread."""
        with self._lock:
            self._push_up_to(index)
            if is_last and not self._is_finished and len(self.pieces) == index + 1:
                self.finish()
            return "".join(self.pieces[index:]) if is_last else self.pieces[index]

    def offset_of(self, index: int) -> int:
        """Return where the text of the token of this index begins: in the text before a stop, or at its end."""
        with self._lock:
            self._push_up_to(index)
            offset = self._offsets[index]
            return min(offset, sum(map(len, self.pieces))) if self.stopped else offset

    def tokens_before(self, index: int) -> Iterator[int]:
        """Yield the tokens before the one of this index, those of the prompt first."""
        yield from self._prompt.tokens
        yield from self._tokens[:index]

    def text(self) -> str:
        """Return the whole text, the same as all pieces and the last one together, in any thread."""
        with self._lock:
            if not (self._stop or self._cleans_up or self._is_finished):
                before, text = self._prompt.decoded
                whole = decode(self._tokenizer, before + self._tokens)
                if UNFINISHED not in whole and whole.startswith(text):
                    return whole[len(text) :]
            self._push_up_to(len(self._tokens) - 1)
            if not self._is_finished:
                self.finish()
            return "".join(self.pieces)

    def push(self, token: int) -> str:
        """Return the text that has become final with this token; it may be empty."""
        text, unsettled = self._text_with(token)
        before = self._unsettled_text
        old = common_length(before.rstrip(UNFINISHED) if text.endswith(UNFINISHED) else before, text)
        self._offsets.append(self._length - self._num_given + old)
        self._unsettled, self._unsettled_text = unsettled, text
        end = self._final_length(text)
        piece = self._release(text[self._num_given : end])
        self._num_given = max(self._num_given, end)
        if text and end == len(text):
            self._context, self._unsettled, self._unsettled_text = unsettled, [], ""
            self._shown, self._num_given = "", 0
        return piece

    def finish(self) -> str:
        """Return the text that was held back, at the end of the continuation."""
        self._is_finished = True
        if self.stopped:
            return self._append("")
        text = self._text_with()[0]
        return self._release(text[self._num_given :], is_last=True)

    @cached_property
    def _cleans_up(self) -> bool:
        """Whether the tokenizer removes spaces before punctuation from what it has decoded."""
        backend = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
        is_set = bool(getattr(self._tokenizer, "clean_up_tokenization_spaces", False))
        anyhow = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        return is_set and (type(backend).__name__ != "BPE" or bool(getattr(self._tokenizer, anyhow, False)))

    def _push_up_to(self, index: int) -> None:
        while len(self._offsets) <= index:
            self.push(self._tokens[len(self._offsets)])

    def _text_with(self, *tokens: int) -> tuple[str, list[int]]:
        """Return the text of the unsettled tokens and these, and all of these tokens."""
        if self._context is None:
            self._context, self._unsettled, self._shown = self._prompt.parts
        unsettled = [*self._unsettled, *tokens]
        before, whole = decode(self._tokenizer, self._context), decode(self._tokenizer, self._context + unsettled)
        # bytes that are no characters may take those before them along
        text = whole[len(before) :] if whole.startswith(before) else decode(self._tokenizer, unsettled)
        return text.removeprefix(self._shown), unsettled

    def _final_length(self, text: str) -> int:
        """Return how many of the unsettled tokens' characters no later token can change."""
        if text.endswith(UNFINISHED):
            return self._num_given
        space = text.find(" ", max(0, len(text) - CLEANED)) if self._cleans_up else -1
        return len(text) if space < 0 else max(space, self._num_given)

    def _release(self, text: str, is_last: bool = False) -> str:
        self._length += len(text)
        text = self._held + text
        found = [place for place in map(text.find, self._stop) if place >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) if is_last else len(text) - self._length_of_beginning(text)
        self._held = text[end:]
        return self._append(text[:end])

    def _append(self, piece: str) -> str:
        self.pieces.append(piece)
        return piece

    def _length_of_beginning(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that may begin a stop string."""
        lengths = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(lengths, default=0)
