"""A sequence of tokens and its state in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dmc.kernels.batch import GENERATED, Phase
from dmc.runtime.tally import Held


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
    blocks_to_return: int = 0
    """Blocks that must be free before it continues after a preemption; 0: it was not preempted."""
    num_reused: int = 0
    """Number of the last turn's tokens that the prefix cache provided."""
    num_preemptions: int = 0
    """Number of preemptions since the last turn ended."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its first 1, 2, ... whole blocks of tokens, as far as the prefix cache needed them."""
    held: Held = field(default_factory=Held)
    """Memory at the positions predicted since the last turn ended."""

    @property
    def num_waiting(self) -> int:
        """Number of tokens that are known but not yet fed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def prompt_end(self) -> int:
        """End of the prompt that is being fed, or was fed last; 0 before any."""
        return max((end for begin, end in self.prompts if begin <= self.num_computed_tokens), default=0)

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
