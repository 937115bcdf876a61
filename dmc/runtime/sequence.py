"""Tokens on their way through the cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dmc.kernels.batch import GENERATED, Phase
from dmc.runtime.tally import Held


@dataclass(eq=False)
class Sequence:
    """A growing list of tokens; what is fed lies in the cache, at `row`, until the blocks are taken back."""

    tokens: list[int]
    """Prompts and continuations so far."""
    wanted: int
    """First position whose logits are still of interest."""
    kept: bool = False
    """Stays in the cache when it has nothing to feed, for a session's next turn."""
    prompts: list[tuple[int, int]] = field(default_factory=list)
    """Where each turn's prompt begins and ends; a policy treats all others as generated, one after the other."""
    next_prompt: int = 0
    """Where the next turn's prompt begins: with the last token generated, which is not fed, or behind what is."""
    row: int | None = None
    """Place in the cache; None: nothing is cached."""
    num_computed_tokens: int = 0
    """Leading tokens that are cached."""
    blocks_to_return: int = 0
    """Blocks that must be free before it goes on, since others took its own; 0: they did not."""
    num_reused: int = 0
    """Tokens of the last turn that were not fed, for the prefix cache knew them."""
    num_preemptions: int = 0
    """Times the cache was lost to others since the last turn ended."""
    hashes: list[bytes] = field(default_factory=list)
    """Of its first 1, 2, ... whole blocks of tokens, as far as a prefix cache has asked."""
    held: Held = field(default_factory=Held)
    """Memory at the positions predicted since the last turn ended."""

    @property
    def num_waiting(self) -> int:
        """Tokens that are known but not yet fed."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def prompt_end(self) -> int:
        """Where the prompt ends that is being fed, or was fed last; 0 before any."""
        return max((end for begin, end in self.prompts if begin <= self.num_computed_tokens), default=0)

    def copy(self) -> Sequence:
        """Return another one with the same tokens, which has nothing in the cache."""
        other = replace(self, held=replace(self.held), row=None, num_computed_tokens=0)
        other.tokens, other.prompts, other.hashes = [*self.tokens], [*self.prompts], [*self.hashes]
        return other

    def add_prompt(self, tokens: list[int]) -> None:
        """Append a turn's prompt; one before it that was taken off unanswered becomes a part of it."""
        if self.prompts and self.prompts[-1][1] > self.next_prompt:
            self.prompts.pop()
        self.tokens += tokens
        self.prompts.append((self.next_prompt, len(self.tokens)))

    def stretch(self) -> tuple[int, Phase]:
        """Say how many of the tokens to feed next belong together, and what they are."""
        for begin, end in self.prompts:
            if begin <= self.num_computed_tokens < end:
                first = Phase.FIRST if self.num_computed_tokens == begin else GENERATED
                return end - self.num_computed_tokens, Phase.PROMPT | first
            if self.num_computed_tokens < begin:
                return begin - self.num_computed_tokens, GENERATED
        return self.num_waiting, GENERATED
