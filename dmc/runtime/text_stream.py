"""Incremental detokenization: never half a character, nothing of a stop string."""

from __future__ import annotations

import threading
from typing import Any

UNFINISHED = "\ufffd"


class TextStream:
    """Detokenizes one continuation as it grows, with any tokenizer that has `decode`; or later, when it is asked.

    The tokens of the last piece stay as context: a tokenizer may strip the space before the first token it decodes.

    Args:
        tokenizer: Hugging Face tokenizer.
        stop: strings before which the text ends, also if several tokens form one.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._context: list[int] = []
        self._unsettled: list[int] = []
        self._held = ""
        self._tokens: list[int] = []
        self._lock = threading.Lock()
        self.pieces: list[str] = []
        """The text so far, as tokens have made it final."""
        self.stopped = False
        """Whether a stop string was met."""

    def add(self, token: int) -> None:
        """Append a token without decoding it."""
        self._tokens.append(token)

    def text_of(self, index: int, is_last: bool) -> str:
        """Return what `push` and, of the last token, `finish` give for the token of this index, in any thread."""
        with self._lock:
            while len(self.pieces) <= index:
                self.push(self._tokens[len(self.pieces)])
            if is_last and len(self.pieces) == index + 1:
                self.finish()
            return "".join(self.pieces[index:]) if is_last else self.pieces[index]

    def push(self, token: int) -> str:
        """Return the text that has become final with this token; it may be empty."""
        unsettled = [*self._unsettled, token]
        text = self._new_text(unsettled)
        self._unsettled = unsettled
        if not text or text.endswith(UNFINISHED):
            return self._append("")
        self._context, self._unsettled = unsettled, []
        return self._release(text)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the continuation."""
        if self.stopped:
            return self._append("")
        return self._release(self._new_text(self._unsettled), is_last=True)

    def _new_text(self, unsettled: list[int]) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        return str(self._tokenizer.decode(self._context + unsettled, skip_special_tokens=True))[len(before) :]

    def _release(self, text: str, is_last: bool = False) -> str:
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
