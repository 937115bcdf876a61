"""Find the assistant's turns in a chat that a template has rendered, each with what ends it: they are trained on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dmc.data.sources import Chat, text_of

_MARKS = re.compile("\ufdd0([0-9]+)\ufdd1")  # two code points that Unicode leaves out of texts
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(frozen=True)
class Frame:
    """A template's text around what the assistant says, taken from chats that are made up."""

    header: str
    """Before it; empty where the template does not tell the assistant's turns from others."""
    closing: str
    """Behind it at the end of a chat."""
    endings: tuple[str, ...]
    """Behind it elsewhere, up to the next turn's header: what to look for, in this order."""


class ChatTemplate:
    """Renders and encodes chats; tells the assistant's turns from others.

    What the template marks with `{% generation %}` is learned, and what ends the turn behind it. Without such marks, a
    turn is what stands between its header and its end.

    Args:
        tokenizer: fast, with a chat template; of several, the one named "default".

    Raises:
        ValueError: the tokenizer has no chat template, or none that is the default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template: use an instruct model's, or "
                "columns of prompt, completion."
            )
        self.tokenizer = tokenizer
        self.has_marks = bool(_GENERATION.search(tokenizer.get_chat_template()))
        """Whether the template says itself what the assistant generates."""

    def encode(self, messages: Chat) -> tuple[list[int], list[bool]]:
        """Return token ids, and whether each is learned.

        Raises:
            ValueError, TypeError, LookupError, TemplateError: the template refuses the chat, a content is not text, or
                a turn of the assistant cannot be found.
        """
        messages = [_with_text(message, number) for number, message in enumerate(messages)]
        text = self._render(messages)
        encoded = encode_with_offsets(self.tokenizer, text)
        offsets = encoded["offset_mapping"]
        spans = self._marked(messages, text, offsets) if self.has_marks else self._found(messages, text)
        learned = [any(start < end and stop > begin for begin, end in spans) for start, stop in offsets]
        if not any(learned):
            raise ValueError("nothing of what the assistant says is marked as generated, or it says nothing")
        return list(encoded["input_ids"]), learned

    def closes(self, token_ids: list[int], learned: list[bool]) -> bool:
        """Whether a chat ends with a turn of the assistant and a special token that ends it.

        Raises:
            ValueError: the last turn is not the assistant's.
        """
        for token, is_learned in zip(reversed(token_ids), reversed(learned), strict=True):
            if not is_learned:
                raise ValueError("the last turn is not the assistant's")
            if token in self._special or self.tokenizer.decode([token]).strip():
                return token in self._special
        return False

    @cached_property
    def _special(self) -> set[int]:
        added = {token for token, content in self.tokenizer.added_tokens_decoder.items() if content.special}
        return added | set(self.tokenizer.all_special_ids)

    def _render(self, messages: Chat, **options: bool) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _marked(self, messages: Chat, text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return what the template marks; where it marks the text alone, with what ends the turn."""
        encoded = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        masks, spans = encoded["assistant_masks"], []
        try:
            closing, endings = self._frame.closing, self._frame.endings
        except (TemplateError, TypeError, ValueError, LookupError):
            closing, endings = "", ()  # a template for other chats than those made up: its marks alone
        for is_learned, places in itertools.groupby(range(len(masks)), masks.__getitem__):
            if is_learned:
                inside = [offsets[place] for place in places]
                end = inside[-1][1]
                is_last = text.endswith(closing) and len(text) - len(closing) <= end
                behind = len(text) - end if is_last else max((_num_left(text, end, of) for of in endings), default=0)
                spans.append((inside[0][0], end + behind))
        return spans

    def _found(self, messages: Chat, text: str) -> list[tuple[int, int]]:
        """Return begin and end of each of the assistant's turns, with what ends a turn.

        A turn begins behind the template's header. Marks behind what each message says, rendered along with it, tell
        where turns end.
        """
        header = self._frame.header
        if not header.strip():
            raise ValueError("it does not tell the assistant's turns from others: mark them with {% generation %}")
        ends = self._ends(messages, text)
        spans, place = [], 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                if header.strip() in str(message.get("content")):
                    raise ValueError(f"message {number} holds {header.strip()!r}, which begins a turn of the assistant")
                place = ends.get(number, place)
                continue
            stop = ends.get(number)
            begin = text.find(header, place, stop)
            if begin < 0 or (_says(message) and stop is None) or not self._is_sure(messages, number, ends, text, place):
                raise ValueError(f"message {number}, of the assistant, cannot be found in what it renders")
            begin += len(header)
            place = self._end_of(messages, number, begin, ends, text)
            spans.append((begin, place))
        return spans

    def _ends(self, messages: Chat, text: str) -> dict[int, int]:
        """Return where what a message says ends, by its number, for all messages that are rendered and say something.

        A template may look at how a user's message ends, which a mark changes: then only the assistant's have marks.
        """
        for is_marked in (_says, lambda message: _says(message) and message.get("role") == "assistant"):
            marked = [
                {**message, "content": _with_mark(message["content"], number)} if is_marked(message) else message
                for number, message in enumerate(messages)
            ]
            rendered, ends = "", {}
            for place, piece in enumerate(_MARKS.split(self._render(marked))):
                if place % 2:
                    ends[int(piece)] = len(rendered)
                else:
                    rendered += piece
            if rendered == text:
                return ends
        raise ValueError("it renders the assistant's turns by how they end, so that they cannot be found")

    def _is_sure(self, messages: Chat, number: int, ends: dict[int, int], text: str, place: int) -> bool:
        """Whether a turn's header cannot be that of another message before it, whose end is not known."""
        before = messages[number - 1] if number else None
        if before is None or number - 1 in ends or not _says(before):
            return True
        return text.count(self._frame.header, place, ends.get(number, len(text))) == 1

    def _end_of(self, messages: Chat, number: int, begin: int, ends: dict[int, int], text: str) -> int:
        """Return the end of a turn of the assistant with what ends it."""
        message, end = messages[number], ends.get(number, begin)
        is_last = number == len(messages) - 1
        endings = [*([self._frame.closing] if is_last else []), *self._frame.endings]
        if _says(message):
            said = message["content"]
            space = said[len(said.rstrip()) :]
            for ending, kept in itertools.product(endings, range(len(space), -1, -1)):
                if text.startswith(space[:kept] + ending, end):
                    return end + kept + len(ending)
        limit = self._limit(messages, number, ends, text)
        for ending in filter(str.strip, endings):  # behind what it calls, say
            found = text.find(ending, end, limit)
            if found >= 0:
                return found + len(ending)
        raise ValueError(f"message {number}, of the assistant, has no end in what it renders")

    def _limit(self, messages: Chat, number: int, ends: dict[int, int], text: str) -> int:
        """Return a place that the turns behind a message do not begin before."""
        following = next((other for other in range(number + 1, len(messages)) if other in ends), None)
        if following is None:
            return len(text)
        said = messages[following]["content"].rstrip()
        return ends[following] - (len(said) if text.endswith(said, 0, ends[following]) else 0)

    @cached_property
    def _frame(self) -> Frame:
        asked, answered, again = "\ufdd0q", "\ufdd0a", "\ufdd0f"  # as in no template
        user, assistant = {"role": "user", "content": asked}, {"role": "assistant", "content": answered}
        alone, prompted = (self._render([user], add_generation_prompt=prompts) for prompts in (False, True))
        short = self._render([user, assistant])
        long = self._render([user, assistant, {"role": "user", "content": again}])
        before_user, _, behind_user = alone.rpartition(asked)
        between = [text.rpartition(asked)[2].rpartition(answered)[0] for text in (short, long)]
        opening = _common_start(*between, prompted.rpartition(asked)[2])
        header = opening.removeprefix(_common_start(opening, behind_user))
        closing = short.rpartition(answered)[2]
        gap = long.rpartition(answered)[2].rpartition(again)[0]  # from the answer to the next question
        next_header = _common_end(gap, before_user)
        endings = {_common_start(closing, gap)}
        if next_header.strip():
            endings.add(gap.removesuffix(next_header))
        endings = {ending if ending.strip(" ") else "" for ending in endings}  # a space begins the next word
        longest_first = tuple(sorted(endings, key=len, reverse=True))
        return Frame(header if header.strip() else opening, closing, longest_first)


def encode_with_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """Encode a text without special tokens, with the place of each token in it.

    Raises:
        ValueError: the tokenizer is not fast.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"The tokenizer {tokenizer.name_or_path!r} is not fast (tokenizer.json): it has no offsets.")
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)


def _with_text(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message without keys that have no value, its content a text: templates print a list as Python does."""
    message = {key: value for key, value in message.items() if value is not None}
    if "content" in message:
        try:
            message["content"] = text_of(message)
        except TypeError as error:
            raise TypeError(f"message {number}: {error}") from None
    return message


def _says(message: dict[str, Any]) -> bool:
    """Whether a message holds text."""
    return bool(str(message.get("content", "")).strip())


def _num_left(text: str, place: int, ending: str) -> int:
    """Return how many letters of an ending stand behind a place, the others before it; 0 where it is not there."""
    for num_before in range(len(ending)):
        if text.endswith(ending[:num_before], 0, place) and text.startswith(ending[num_before:], place):
            return len(ending) - num_before
    return 0


def _common_start(*texts: str) -> str:
    return "".join(letters[0] for letters in _while_equal(zip(*texts, strict=False)))


def _common_end(*texts: str) -> str:
    return "".join(letters[0] for letters in _while_equal(zip(*map(reversed, texts), strict=False)))[::-1]


def _while_equal(letters: Iterator[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    return itertools.takewhile(lambda several: len({*several}) == 1, letters)


def _with_mark(text: str, number: int) -> str:
    """Put a mark behind the last letter of a text, where a template strips nothing."""
    length = len(text.rstrip())
    return f"{text[:length]}\ufdd0{number}\ufdd1{text[length:]}"
