"""Log-probabilities in OpenAI's two formats, of completions and of chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dmc.runtime.text_stream import TextStream
from dmc.serving.token_texts import TokenTexts

LEAST_LOGPROB = -9999.0
"""Log-probability that OpenAI writes for an impossible token; JSON has no infinity."""


class TokenLogprob(NamedTuple):
    """A token, its log-probability, the most likely tokens with theirs, and its place in the text."""

    token: int
    logprob: float | None
    top: dict[int, float]
    offset: int
    """Where its text begins in the text that is sent."""
    begins_text: bool
    """Whether no token before it, of the prompt too, has a text."""


def in_text(
    steps: Iterable[tuple[int, float | None, dict[int, float]]],
    texts: TokenTexts,
    stream: TextStream,
    first: int = 0,
    shift: int = 0,
) -> list[TokenLogprob]:
    """Place tokens in the text of their stream.

    Args:
        steps: tokens, their log-probabilities, and those of the most likely tokens.
        texts: of the tokenizer.
        stream: what the tokens were added to.
        first: index of the first token in the stream.
        shift: length of the text that is sent before the stream's.
    """
    return [
        TokenLogprob(
            *(token, logprob, top, shift + stream.offset_of(index)),
            begins_text=texts.special_ids.issuperset(stream.tokens_before(index)),
        )
        for index, (token, logprob, top) in enumerate(steps, start=first)
    ]


def chat_logprobs(tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """Return a chat's `logprobs`: every token with its bytes, which together are those of the text."""

    def described(token: int, logprob: float | None, begins_text: bool) -> dict[str, Any]:
        data = texts.bytes_of(token, begins_text)
        return {"token": texts.name(token, data), "bytes": [*data], "logprob": _finite(logprob)}

    content = [
        described(token.token, token.logprob, token.begins_text)
        | {"top_logprobs": [described(*item, token.begins_text) for item in token.top.items()]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """Return a completion's `logprobs`; of tokens with one name the less likely ones are called `token_id:`."""

    def named(token: int, begins_text: bool) -> str:
        return texts.name(token, texts.bytes_of(token, begins_text), prefix="bytes:")

    tops: list[dict[str, float | None] | None] = []
    for token in tokens:
        if token.logprob is None:
            tops.append(None)
            continue
        top = {named(token.token, token.begins_text): _finite(token.logprob)}
        for other, logprob in sorted(token.top.items(), key=lambda item: -item[1]):
            if other != token.token:
                name = named(other, token.begins_text)
                top[f"token_id:{other}" if name in top else name] = _finite(logprob)
        tops.append(top)
    return {
        "tokens": [named(token.token, token.begins_text) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": [token.offset for token in tokens],
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
