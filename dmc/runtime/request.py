"""A request: the tokens of its sequence and their place in the cache, its sampling parameters, state and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dmc.kernels.batch import GENERATED, Phase
from dmc.runtime.generation import FinishReason, Generation, GenerationStats, Step
from dmc.runtime.options import SamplingParams
from dmc.runtime.sampling import History
from dmc.runtime.snapshot import Snapshot
from dmc.runtime.tally import ScoredPositions
from dmc.runtime.text_stream import TextStream

DRAWS = 32
"""Uniform numbers that a request draws at a time, the same as one by one."""


@dataclass(eq=False)
class Base:
    """What a frozen sequence has left to others, which go on from it when they get a row."""

    snapshot: Snapshot | None
    """None: it is lost, or was dropped."""


@dataclass(eq=False)
class Sequence:
    """A growing list of tokens; computed ones are in the cache, at `row`, until it is preempted."""

    tokens: list[int]
    """Prompts and continuations so far."""
    next_logit_position: int
    """First position whose logits are still needed."""
    kept: bool = False
    """Whether it stays in the cache when it has nothing to feed, for a session's next turn."""
    prompts: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of each turn's prompt; a policy treats all other tokens as generated, one after the other."""
    next_prompt: int = 0
    """Begin of the next turn's prompt: the last generated token, which is not fed yet, or the end."""
    row: int | None = None
    """Cache row; None: nothing is cached."""
    num_computed_tokens: int = 0
    """Number of leading tokens that are cached."""
    base: Base | None = None
    """What it goes on from instead of computing its first tokens; None: nothing."""
    blocks_to_return: int = 0
    """Blocks that must be free before it continues after a preemption; 0: it was not preempted."""
    num_reused: int = 0
    """Number of the last turn's tokens that the prefix cache provided."""
    num_preemptions: int = 0
    """Number of preemptions since the last turn ended."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its first 1, 2, ... whole blocks of tokens, as far as the prefix cache needed them."""
    held: ScoredPositions = field(default_factory=ScoredPositions)
    """Memory at the positions predicted since the last turn ended."""

    @property
    def num_waiting(self) -> int:
        """Number of tokens that are known but not yet fed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def prompt_end(self) -> int:
        """End of the prompt that is being fed, or was fed last; 0 before any."""
        return max((end for begin, end in self.prompts if begin <= self.num_computed_tokens), default=0)

    @property
    def is_inside_prompt(self) -> bool:
        """Whether a part of a prompt has been fed, of which a policy has its own state beside the cache."""
        return any(begin < self.num_computed_tokens < end for begin, end in self.prompts)

    def copy(self) -> Sequence:
        """Return a new sequence with the same tokens and nothing in the cache."""
        other = replace(self, held=replace(self.held), row=None, num_computed_tokens=0)
        other.tokens, other.prompts, other.hashes = [*self.tokens], [*self.prompts], [*self.hashes]
        return other

    def add_prompt(self, tokens: list[int]) -> None:
        """Append a turn's prompt; an aborted, unanswered prompt before it becomes a part of it."""
        if self.prompts and self.prompts[-1][1] > self.next_prompt:
            self.prompts.pop()
        self.tokens += tokens
        self.prompts.append((self.next_prompt, len(self.tokens)))

    def stretch(self) -> tuple[int, Phase]:
        """Return how many of the next tokens share a phase, and the phase."""
        for begin, end in self.prompts:
            if begin <= self.num_computed_tokens < end:
                first = Phase.FIRST if self.num_computed_tokens == begin else GENERATED
                return end - self.num_computed_tokens, Phase.PROMPT | first
            if self.num_computed_tokens < begin:
                return begin - self.num_computed_tokens, GENERATED
        return self.num_waiting, GENERATED


Keep = Callable[[Tensor, Tensor], Tensor]
"""Reduces log-probabilities, float32 [n, vocab], given the true tokens, int64 [n]."""


def of_all_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep everything, [n, vocab]."""
    return logprobs


def of_given_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Keep the log-probability of each true token, [n]."""
    return logprobs.gather(-1, tokens[:, None])[:, 0]


def of_most_likely(count: int) -> Keep:
    """Keep each true token's log-probability, and the most likely tokens with theirs, float64 [n, 1 + 2 count]."""

    def keep(logprobs: Tensor, tokens: Tensor) -> Tensor:
        values, indices = logprobs.topk(min(count, logprobs.shape[-1]))
        pairs = torch.stack((indices.double(), values.double()), dim=-1).flatten(1)
        return torch.cat((of_given_tokens(logprobs, tokens)[:, None], pairs), dim=-1)

    return keep


@dataclass
class Forced:
    """Tokens that are given, in their order, and what is kept of the predictions so far."""

    tokens: list[int]
    keep: Keep = of_all_tokens
    kept: list[Tensor] = field(default_factory=list)
    num_predicted: int = 0

    def take(self, logits: Tensor) -> int:
        """Reduce and keep predictions, [n, vocab], of the next tokens; return how many of these are given."""
        tokens = self.tokens[self.num_predicted : self.num_predicted + len(logits)]
        if tokens:
            logprobs = logits[: len(tokens)].float().log_softmax(-1)
            self.kept.append(self.keep(logprobs, torch.tensor(tokens, device=logits.device)))
            self.num_predicted += len(tokens)
        return len(tokens)

    @property
    def is_waiting(self) -> bool:
        """Whether some are still to be predicted."""
        return self.num_predicted < len(self.tokens)

    @property
    def is_finite(self) -> bool:
        """Whether all kept values are finite."""
        return all(not values.isnan().any() for values in self.kept)

    @property
    def steps(self) -> list[Step]:
        """The tokens that have been predicted, of which `of_most_likely` has kept what is reported."""
        rows = [row for values in self.kept for row in values.tolist()]
        return [
            (token, given, dict(zip(map(int, top[::2]), top[1::2], strict=True)))
            for token, (given, *top) in zip(self.tokens, rows, strict=False)
        ]


@dataclass(eq=False, slots=True)
class TokenEvent:
    """A token that a forward pass has brought."""

    request: Request
    token_id: int
    logprob: float
    """Natural-log probability of the token under the unmodified distribution."""
    finish_reason: FinishReason | None
    """None: more is to come."""
    index: int
    """Which token of its continuation it is."""
    number: int = 0
    """Which of the request's `n` continuations it belongs to."""
    top_logprobs: dict[int, float] | None = None
    """Of the most likely tokens, if they were asked for."""

    @property
    def text(self) -> str:
        """What has become final of the text, maybe nothing; the pieces of a request make up its text.

        It is decoded when asked for, in the caller's thread.

        Raises:
            Exception: what the tokenizer raises.
        """
        stream = self.request.branches[self.number].text_stream
        return "" if stream is None else stream.text_of(self.index, self.finish_reason is not None)


@dataclass(eq=False)
class Request:
    """A prompt to continue; `generation` is there when it has finished."""

    sequence: Sequence
    prompt: list[int]
    """Tokens that the request appends to its sequence when it starts."""
    params: SamplingParams
    """With the model's own ends of sequence among the tokens that end it."""
    generator: torch.Generator | None = None
    """Source of its draws; None: it is greedy."""
    text_stream: TextStream | None = None
    """Decodes new tokens to text, as they come or at the end; None: there is no tokenizer."""
    forced: Forced = field(default_factory=lambda: Forced([]))
    """Tokens whose predictions are asked for although they are given: the prompt's, where its probabilities are."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    root: Request | None = None
    """The request that was submitted, of which this is another continuation; None: this one."""
    number: int = 0
    """Which of its continuations this is."""
    alternatives: list[Request] = field(default_factory=list)
    """The others of `n` continuations, as soon as the prompt has been computed."""
    outcome: Generation | None = None
    """This continuation, when it has ended."""
    inbox: deque[TokenEvent] | None = None
    """Events that a stream has still to hand out."""
    generation: Generation | None = None
    """All continuations, when the last has ended."""
    error: Exception | None = None
    """Why it could not go on; its generation holds what came before."""
    stats_before: GenerationStats | None = None
    """What was held when it last had a place in the cache, of one that may end without another."""
    _history: History | None = None
    _uniforms: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Append the prompt to the sequence; a token that ended the turn before was not fed and comes with it."""
        first = len(self.sequence.tokens)
        self.sequence.add_prompt(self.prompt)
        self.sequence.next_logit_position = len(self.sequence.tokens) - 1
        if self.params.prompt_logprobs is not None:
            self.sequence.next_logit_position = first
            self.forced = Forced(self.prompt[1:], of_most_likely(self.params.prompt_logprobs))

    @property
    def branches(self) -> list[Request]:
        """All continuations that have begun."""
        return [self, *self.alternatives]

    def branch(self, sequence: Sequence, generator: torch.Generator | None) -> Request:
        """Begin another continuation of the prompt, with nothing generated yet."""
        stream = None if self.text_stream is None else self.text_stream.another()
        other = Request(sequence, self.prompt, self.params, generator, stream, self.forced, root=self)
        other.number = len(self.branches)
        self.alternatives.append(other)
        return other

    @property
    def new_tokens(self) -> list[int]:
        """The continuation so far."""
        tokens = self.sequence.tokens
        return tokens[len(tokens) - len(self.logprobs) :]

    @property
    def history(self) -> History | None:
        """Tokens so far, where the next one's logits depend on them."""
        if self._history is None and self.params.changes_logits:
            tokens = self.sequence.tokens
            self._history = History(tokens, len(tokens) - len(self.logprobs))
        return self._history

    def uniform(self, ahead: int = 0) -> float:
        """Return what the next token, or one so many later, is drawn by: the same however often its pass fails."""
        if self.params.temperature == 0:
            return 0.0
        if len(self._uniforms) <= ahead:
            more = torch.rand(DRAWS, dtype=torch.float64, generator=self.generator).tolist()
            self._uniforms = more[::-1] + self._uniforms
        return self._uniforms[-1 - ahead]

    def take(self, logits: Tensor) -> int:
        """Take the sequence's next predictions, [n, vocab]; return how many of them are of tokens that are given."""
        count = self.forced.take(logits)
        self.sequence.next_logit_position += count
        return count

    def accept(self, token: int, logprob: float, top: dict[int, float]) -> TokenEvent:
        """Append a generated token and tell what it means."""
        sequence, params, stream, index = self.sequence, self.params, self.text_stream, len(self.logprobs)
        sequence.next_prompt = len(sequence.tokens)
        sequence.tokens.append(token)
        sequence.next_logit_position += 1
        self.logprobs.append(logprob)
        if self._uniforms:
            self._uniforms.pop()
        reason: FinishReason | None = None
        if token in params.stop_token_ids:
            reason = "stop"
        elif index + 1 >= params.max_new_tokens:
            reason = "length"
        if stream is not None:
            stream.add(token)
            if params.stop:
                stream.text_of(index, is_last=False)
                reason = "stop" if stream.stopped else reason
        event = TokenEvent(self.root or self, token, logprob, reason, index, self.number)
        if params.top_logprobs:
            self.top_logprobs.append(top)
            event.top_logprobs = top
        if event.request.inbox is not None:
            event.request.inbox.append(event)
        return event

    def finish(self, reason: FinishReason, stats: GenerationStats) -> None:
        """Put the generation together; one whose text cannot be decoded ends with the tokenizer's error."""
        tokens, root, text = self.new_tokens, self.root or self, None
        if self.text_stream is not None:
            try:
                text = self.text_stream.text()
            except Exception as error:
                text, reason, root.error = "".join(self.text_stream.pieces), "error", root.error or error
        prompt_steps = [] if self.params.prompt_logprobs is None else self.forced.steps
        self.outcome = Generation(
            *(tokens, text, self.logprobs, stats, reason, self.top_logprobs),
            prompt_logprobs=[logprob for _, logprob, _ in prompt_steps],
            prompt_top_logprobs=[top for _, _, top in prompt_steps],
        )
        outcomes = [branch.outcome for branch in root.branches if branch.outcome is not None]
        if len(outcomes) == len(root.branches):
            root.generation = replace(outcomes[0], alternatives=outcomes[1:])


@dataclass(eq=False)
class ForcedRequest(Request):
    """A continuation that is given: it is fed behind the prompt, `forced` keeps what was predicted, no token comes."""

    def begin(self) -> None:
        """Append the prompt, if there is one, and the continuation but for its last token, which is not fed."""
        if self.prompt:
            self.sequence.add_prompt(self.prompt)
        self.sequence.next_logit_position = len(self.sequence.tokens) - (len(self.forced.tokens) > 0)
        self.sequence.tokens += self.forced.tokens[:-1]
