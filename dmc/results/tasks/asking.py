"""Tasks that ask for something far back: the cache compresses a prompt, then is fed the rest, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from dmc.results.tasks.base import Breakdown, Sample, SampleResult, Task
from dmc.results.tasks.forking import answers_of
from dmc.runtime import Engine, Generation, SamplingParams

Question = Literal["known", "hidden"]
"""Whether the cache is compressed with the question in the prompt, or with the context alone."""


@dataclass(frozen=True)
class Turns(Sample):
    """A conversation, one session of the engine: each turn sees the cache that the one before has compressed.

    `prompt` is all of its messages to the model.
    """

    turns: list[list[int]] = field(default_factory=list)
    """The prompt of each turn."""
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Right answers by the index of their turn; the last turn has one."""
    reply: SamplingParams | None = None
    """Sampling parameters of the turns without an answer; None: they are only fed."""


class Asking(Task):
    """A task with greedy answers, no token of which is predicted by the prompt's own pass."""

    main_metric = "exact_match"
    higher_is_better = True
    question: str

    def params(self) -> SamplingParams:
        """Return the sampling parameters of answers."""
        raise NotImplementedError

    def grade(self, engine: Engine, answer: list[int], generation: Generation) -> dict[str, float]:
        """Compare a generated answer with the right one, 1 or 0 for each metric; default: every token must be right."""
        return {"exact_match": float(generation.token_ids == answer)}

    def evaluate(self, engine: Engine, samples: Sequence[Sample]) -> list[SampleResult]:
        """See `Task.evaluate`; `loss` is the right answer's, which conversations do not have.

        A prompt is compressed once, whatever number of samples share it.
        """
        if conversations := [sample for sample in samples if isinstance(sample, Turns)]:
            return self._converse(engine, conversations)
        results = []
        for sample, (generation, logprobs) in zip(samples, answers_of(engine, samples, self.params()), strict=True):
            metrics = self.grade(engine, sample.continuation, generation)
            metrics |= {"loss": -float(logprobs.double().mean())}
            results.append(SampleResult(metrics, generation.stats, [Breakdown(sample.coordinates, metrics)]))
        return results

    def _converse(self, engine: Engine, chats: Sequence[Turns]) -> list[SampleResult]:
        """Hold conversations, the same turn of all of them together; the first turn is 1."""
        breakdown: list[list[Breakdown]] = [[] for _ in chats]
        stats = {}
        with ExitStack() as stack:
            sessions = [stack.enter_context(engine.session()) for _ in chats]
            for turn in range(max(len(chat.turns) for chat in chats)):
                requests = {}
                for index, chat in enumerate(chats):
                    params = self.params() if turn in chat.answers else chat.reply
                    if turn < len(chat.turns) and params is None:
                        sessions[index].feed(chat.turns[turn])
                    elif turn < len(chat.turns):
                        requests[index] = engine.submit(chat.turns[turn], params, sessions[index])
                engine.run(list(requests.values()), progress=False)
                for index, request in requests.items():
                    generation, chat = request.generation, chats[index]
                    assert generation is not None
                    if turn in chat.answers:
                        metrics = self.grade(engine, chat.answers[turn], generation)
                        breakdown[index].append(Breakdown({"turn": turn + 1}, metrics))
                    if turn + 1 == len(chat.turns):
                        stats[index] = generation.stats
                        sessions[index].close()
        means = [
            {name: fmean(part.metrics[name] for part in turns) for name in turns[0].metrics} for turns in breakdown
        ]
        return [SampleResult(metrics, stats[index], breakdown[index]) for index, metrics in enumerate(means)]
