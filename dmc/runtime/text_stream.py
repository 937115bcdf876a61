"""Incremental detokenization: never half a character, nothing of a stop string."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\ufffd"


class TextStream:
    """Detokenizes one continuation as it grows, with any tokenizer that has `decode`.

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
        self.pieces: list[str] = []
        """The text so far."""
        self.stopped = False
        """Whether a stop string was met."""

    def push(self, token: int) -> str:
        """Return the text that has become final with this token; it may be empty."""
        self._unsettled.append(token)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._context, self._unsettled = self._unsettled, []
        return self._release(text)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the continuation."""
        if self.stopped:
            return ""
        return self._release(self._new_text(), is_last=True)

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        return self._tokenizer.decode(self._context + self._unsettled, skip_special_tokens=True)[len(before) :]

    def _release(self, text: str, is_last: bool = False) -> str:
        text = self._held + text
        found = [place for place in map(text.find, self._stop) if place >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) if is_last else len(text) - self._length_of_beginning(text)
        self._held = text[end:]
        self.pieces.append(text[:end])
        return text[:end]

    def _length_of_beginning(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that may begin a stop string."""
        lengths = (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(lengths, default=0)
