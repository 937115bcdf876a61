"""The bytes that single tokens add to a text, and how OpenAI's API names those that are no whole characters."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import Any

from dmc.runtime.text_stream import UNFINISHED, decode

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte as vocabularies with byte fallback write it."""


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level vocabularies, where all bytes are printable."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenTexts:
    """What the tokens of a tokenizer are in a text.

    Args:
        tokenizer: Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._letters = tokenizer, byte_letters()
        self.special_ids = frozenset(tokenizer.all_special_ids)
        """Tokens that no text shows."""
        self.bytes_of = lru_cache(maxsize=2**16)(self._bytes_of)

    def _bytes_of(self, token: int, begins_text: bool) -> bytes:
        """Return the bytes that a token adds to a text, or begins one with, where tokenizers may strip a space."""
        if token in self.special_ids:
            return b""
        context = [] if begins_text else self._context
        before = decode(self._tokenizer, context)
        text = decode(self._tokenizer, [*context, token])[len(before) :]
        return self._raw_bytes(token) or text.encode("utf-8", "replace") if UNFINISHED in text else text.encode()

    def _raw_bytes(self, token: int) -> bytes:
        """Return the bytes that the vocabulary writes for a token that is no text, or none."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if (byte := BYTE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return bytes(map(self._letters.__getitem__, piece)) if self._letters.keys() >= {*piece} else b""

    @cached_property
    def _context(self) -> list[int]:
        """A token that is a word, behind which others are as inside a text."""
        ordinary = (token for token in range(len(self._tokenizer)) if token not in self.special_ids)
        words = (token for token in ordinary if re.fullmatch(r"\w", decode(self._tokenizer, [token]), re.ASCII))
        return [word for word in (next(words, None),) if word is not None]

    def name(self, token: int, data: bytes, prefix: str = "") -> str:
        """Return what OpenAI calls a token: its text, or if that is none, its bytes behind a prefix.

        Args:
            token: its id.
            data: its bytes.
            prefix: `bytes:` in completions.
        """
        if token in self.special_ids:
            return str(self._tokenizer.convert_ids_to_tokens(token))
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)
