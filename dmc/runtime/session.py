"""Sessions: several turns on one cache."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch import Tensor

from dmc.policies.protection import positions_held
from dmc.runtime.engine_core import EngineCore
from dmc.runtime.generation import Generation, GenerationStats
from dmc.runtime.options import SamplingParams
from dmc.runtime.request import Base, Sequence, TokenEvent


class Session:
    """A conversation whose cache stays between turns: `with engine.session() as session: ...`.

    A further turn feeds only its prompt and the last token generated before it; `feed` takes a context without
    generating. While the session rests, the engine may free its blocks for others; the next turn then recomputes them
    from the tokens.

    Args:
        engine: the `Engine` that serves it.
        core: its requests.
    """

    def __init__(self, engine: Any, core: EngineCore) -> None:
        self.engine, self.core = engine, core
        self.sequence = Sequence([], next_logit_position=0, kept=True)
        """Tokens of all turns so far, and their state in the cache."""
        self.is_closed = False

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokens(self) -> list[int]:
        """Prompts and continuations of all turns so far."""
        return list(self.sequence.tokens)

    def idle_sequence(self) -> Sequence:
        """Return the sequence, which another turn may continue.

        Raises:
            ValueError: the session is closed, or its last turn has not finished.
        """
        if self.is_closed:
            raise ValueError("the session is closed: start another one")
        self.core.check_is_idle(self.sequence)
        return self.sequence

    def generate(self, prompt: str | list[int], params: SamplingParams | None = None) -> Generation:
        """Continue the conversation with another prompt.

        Args:
            prompt: text or token ids, not empty; a special token at its start is only added in the first turn.
            params: sampling parameters of this turn.
        Returns:
            The continuation; its `stats` are those of the whole conversation.
        Raises:
            ValueError: see `Engine.submit`.
        """
        request = self.engine.submit(prompt, params, self)
        self.engine.run([request])
        assert request.generation is not None
        return request.generation

    def feed(self, prompt: str | list[int]) -> GenerationStats:
        """Take a context into the cache and generate nothing; no logits are computed.

        The next turn's prompt begins after it: with the full cache or learned gates, both give the same cache as
        one joint prompt. A policy compresses at the end of each prompt, so also after this one.

        Args:
            prompt: see `generate`.
        Returns:
            Statistics of the whole conversation.
        Raises:
            ValueError: see `Engine.submit`. After any other error the context is part of the conversation, which the
                next turn continues: do not feed it again.
        """
        return self.engine.feed(prompt, self)

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Continue the conversation, token by token: see `Engine.stream`."""
        return self.engine.stream(prompt, params, self)

    def fork(self) -> Session:
        """Return another session that continues from here: the cache is shared until one of the two writes.

        Raises:
            ValueError: see `Engine.submit`.
        """
        other = Session(self.engine, self.core)
        (other.sequence,) = self.core.copies(self.idle_sequence(), 1)
        return other

    def freeze(self) -> FrozenSession:
        """End the session, and leave what it holds to others: see `FrozenSession`.

        Raises:
            ValueError: it holds nothing, its last turn has not finished, or its policy keeps state outside the pages.
        """
        frozen = FrozenSession(self, self.core.freeze(self.idle_sequence()))
        self.close()
        return frozen

    def positions_held(self) -> list[list[Tensor]]:
        """List the positions of the tokens held, by layer and KV head, int64 [n], ascending.

        Raises:
            ValueError: nothing is cached; no policy evicts tokens, or the model merges them.
        """
        self.core.settle()
        if self.sequence.row is None:
            raise ValueError("the session holds nothing: give it a turn first")
        return positions_held(self.engine.cache, self.sequence.row)

    def close(self) -> None:
        """End the session: abort a running turn and free the blocks. May be called twice."""
        self.is_closed, self.sequence.kept = True, False
        self.core.close(self.sequence)


class FrozenSession:
    """What a session held, kept for others to go on from: blocks that are not given up, and no row.

    Args:
        session: what was frozen.
        base: what it held.
    """

    def __init__(self, session: Session, base: Base) -> None:
        self._engine, self._core, self._sequence, self._base = session.engine, session.core, session.sequence, base

    @property
    def tokens(self) -> list[int]:
        """Prompts and continuations of all turns."""
        return list(self._sequence.tokens)

    @property
    def blocks_to_share(self) -> int:
        """Blocks that a session which goes on from here takes beside those that it shares, at most, when it starts."""
        return self._engine.cache.blocks_to_share(self._base.snapshot)  # type: ignore[no-any-return]

    @property
    def is_lost(self) -> bool:
        """Whether its blocks are gone, by `close` or because a pass has failed: sessions compute its tokens again."""
        return self._base.snapshot is None

    def session(self) -> Session:
        """Return a session that goes on from here; it takes a row, and shares the blocks, when its turn is admitted."""
        other = Session(self._engine, self._core)
        other.sequence = self._sequence.copy()
        other.sequence.kept, other.sequence.base = True, self._base
        return other

    def close(self) -> None:
        """Free the blocks that nobody else holds. May be called twice."""
        self._core.drop(self._base)
