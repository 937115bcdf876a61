"""One request on its way through the engine, and the news of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dmc.runtime.generation import FinishReason, Generation, GenerationStats
from dmc.runtime.sampling import SamplingParams
from dmc.runtime.sequence import Sequence
from dmc.runtime.text_stream import TextStream


class TokenEvent(NamedTuple):
    """A token that a forward pass has brought."""

    request: Request
    token_id: int
    text: str
    """What has become final of the text, maybe nothing; the pieces of a request make up its text."""
    logprob: float
    """Natural-log probability of the token under the unmodified distribution."""
    finish_reason: FinishReason | None
    """None: more is to come."""


@dataclass(eq=False)
class Request:
    """A prompt to continue; `generation` is there when it has finished."""

    sequence: Sequence
    prompt: list[int]
    """Tokens that the request appends to its sequence when it starts."""
    params: SamplingParams
    stop_ids: frozenset[int]
    """Tokens that end it."""
    generator: torch.Generator | None
    """Source of its draws; None: it is greedy."""
    text_stream: TextStream | None
    """None: nobody asks for text before the end."""
    logprobs: list[float] = field(default_factory=list)
    inbox: deque[TokenEvent] | None = None
    """Events that a stream has still to hand out."""
    generation: Generation | None = None
    error: Exception | None = None
    """Why it could not go on; its generation holds what came before."""

    def begin(self) -> None:
        """Append the prompt to the sequence; a token that ended the turn before was not fed and comes with it."""
        self.sequence.add_prompt(self.prompt)
        self.sequence.wanted = len(self.sequence.tokens) - 1

    def accept(self, token: int, logprob: float) -> TokenEvent:
        """Append a generated token and tell what it means."""
        self.sequence.next_prompt = len(self.sequence.tokens)
        self.sequence.tokens.append(token)
        self.sequence.wanted += 1
        self.logprobs.append(logprob)
        text = "" if self.text_stream is None else self.text_stream.push(token)
        reason: FinishReason | None = None
        if token in self.stop_ids or (self.text_stream is not None and self.text_stream.stopped):
            reason = "stop"
        elif len(self.logprobs) >= self.params.max_new_tokens:
            reason = "length"
        if reason is not None and self.text_stream is not None:
            text += self.text_stream.finish()
        event = TokenEvent(self, token, text, logprob, reason)
        if self.inbox is not None:
            self.inbox.append(event)
        return event

    def finish(self, reason: FinishReason, stats: GenerationStats, tokenizer: Any) -> None:
        """Put the generation together."""
        tokens = self.sequence.tokens[len(self.sequence.tokens) - len(self.logprobs) :]
        text: str | None = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        if self.text_stream is not None and self.text_stream.stopped:
            text = "".join(self.text_stream.pieces)
        self.generation = Generation(tokens, text, self.logprobs, stats, reason)
