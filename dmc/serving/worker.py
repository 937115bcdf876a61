"""The thread that steps the engines: requests arrive in one queue, and each request has a queue for its tokens."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from dmc.compression.full_attention import context_length
from dmc.ranks import Ranks
from dmc.runtime import Engine, Generation, GenerationStats, SamplingParams, TokenEvent
from dmc.serving.metrics import Metrics
from dmc.serving.requests import APIError, out_of_range

logger = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 20.0
"""The first rank sends the others a message at least this often; without one their collective would time out."""
LOOK_SECONDS = 0.5
"""Minimum time between two readings of the engines' gauges while requests run."""
SNAPSHOT_SECONDS = 0.1
"""Minimum time between two reports of what a running request holds: each of them waits for the device."""
News = tuple["Job", TokenEvent | GenerationStats | Generation | APIError]


def stopped() -> APIError:
    """Return the error of requests whose engines have stopped."""
    return APIError(503, "the engines have stopped", None, "engine_stopped")


@dataclass(eq=False)
class Job:
    """One prompt of a client's request, and the queue of its token events, stats, and final generation or error."""

    name: str
    prompt: list[int]
    params: SamplingParams
    index: int
    news: asyncio.Queue[News] | None
    loop: asyncio.AbstractEventLoop | None
    """`news` and `loop` are None on ranks that receive no requests."""
    question_tokens: int = 0
    """Number of last tokens that are computed after a policy has compressed the tokens before them."""
    watched: bool = False
    """Whether the client asked for the cache's contents while tokens are generated."""
    number: int = -1
    request: Any = None
    """The engine's request; None: not submitted yet."""
    begin: float = field(default_factory=time.monotonic)
    last: float = 0.0
    """Time of its last token."""
    told: float = 0.0
    """Time of the last report of what it holds."""


class Worker:
    """Steps all engines in one thread; on several ranks, one thread each makes the same steps.

    Args:
        engines: engines by served name; they may share models.
        max_waiting: maximum number of waiting requests per name.
        group: ranks over which the models are split; the first one receives requests.
    """

    def __init__(self, engines: dict[str, Engine], max_waiting: int, group: Ranks | None = None) -> None:
        self.engines, self.metrics, self.ranks = engines, Metrics(), group or Ranks()
        self.longest = {name: longest_of(engine) for name, engine in engines.items()}
        self.num_unfinished = dict.fromkeys(engines, 0)
        self.failure: BaseException | None = None
        """Error with which the thread has ended; None: it runs."""
        self._most = {name: engine.cache.num_free_rows + max_waiting for name, engine in engines.items()}
        self._inbox: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        """New jobs, numbers of jobs to abort, and None to stop the thread."""
        self._jobs: dict[int, Job] = {}
        self._news: list[News] = []
        """What the event loop has not been told yet."""
        self._numbers, self._looked = itertools.count(), 0.0
        self._thread = threading.Thread(target=self.run, name="engines", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all requests, stop the other ranks and wait for the thread to end."""
        self._inbox.put(None)
        self._thread.join(timeout=60)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all prompts of one request, or none; call it in the event loop.

        Raises:
            APIError: too many requests wait already, or the thread has ended.
        """
        name = jobs[0].name
        if self.num_unfinished[name] + len(jobs) > max(self._most[name], len(jobs)):
            told = f"{self.num_unfinished[name]} requests run or wait for {name!r}: try again later"
            raise APIError(429, told, None, "rate_limit_exceeded")
        self.num_unfinished[name] += len(jobs)
        for job in jobs:
            job.number = next(self._numbers)
            self._inbox.put(job)
        if self.failure is not None:  # the thread empties the inbox after it has told that it ends, not before
            raise stopped()

    def abort(self, jobs: Sequence[Job]) -> None:
        """Abort prompts whose client has disconnected; finished ones are ignored."""
        for job in jobs:
            self._inbox.put(job.number)

    def run(self) -> None:
        """Handle the inbox and step the engines while requests run, until told to stop."""
        end: BaseException = RuntimeError("the server stops")
        try:
            while all(self._obey(each) for each in self._next()):
                for name in {job.name: None for job in self._jobs.values()}:
                    self._step(name, self.engines[name])
                self._end_finished()
                self._tell()
                if not self._jobs or time.monotonic() - self._looked > LOOK_SECONDS:
                    self._looked = time.monotonic()
                    for name, engine in self.engines.items():
                        self.metrics.count(name, "engine", engine)
        except BaseException as error:
            logger.exception("the engines have stopped")
            end = error
        self.failure = end
        while not self._inbox.empty():
            if isinstance(job := self._inbox.get(), Job):
                self._jobs[job.number] = job
        for job in [*self._jobs.values()]:
            self._close(job, stopped())
        self._tell()

    def _next(self) -> list[Job | int | None]:
        """Return the inbox's items, waiting for one if nothing runs; all ranks return the same."""
        found: list[Job | int | None] = []
        if self.ranks.rank == 0:
            wait, timeout = not self._jobs, HEARTBEAT_SECONDS if self.ranks.size > 1 else None
            with contextlib.suppress(queue.Empty):
                while True:
                    found.append(self._inbox.get(block=wait and not found, timeout=timeout))
        if self.ranks.size > 1:
            bare = [replace(each, news=None, loop=None) if isinstance(each, Job) else each for each in found]
            dist.broadcast_object_list(told := [bare], src=0, group=self.ranks.group)
            found = found if self.ranks.rank == 0 else told[0]
        return found

    def _obey(self, each: Job | int | None) -> bool:
        """Submit or abort a job; return False if the thread shall stop."""
        if isinstance(each, Job):
            self._jobs[each.number] = each
            engine, cut = self.engines[each.name], len(each.prompt)
            if engine.policy is not None:  # only policies compress at a prompt's end
                cut -= min(each.question_tokens, cut - 1)
            try:
                each.request = engine.submit(each.prompt[:cut], each.params, after=each.prompt[cut:])
            except Exception as error:  # every rank raises the same error
                self._close(each, out_of_range(error))
        elif each is not None and (found := self._jobs.get(each)) is not None:
            self.engines[found.name].abort(found.request)
        return each is not None

    def _step(self, name: str, engine: Engine) -> None:
        try:
            events = engine.step()
        except Exception:  # the engine has ended its own requests; other engines continue
            logger.exception("an engine has lost its requests")
            return
        now, jobs = time.monotonic(), {id(job.request): job for job in self._jobs.values()}
        for event in events:
            if (job := jobs.get(id(event.request))) is None:
                continue
            self.metrics.count(name, "token", 1)
            self.metrics.count(name, "later" if job.last else "first", now - (job.last or job.begin))
            job.last = now
            if job.watched and self.ranks.size == 1 and now - job.told > SNAPSHOT_SECONDS:
                job.told = now
                self._news.append((job, engine.stats(event.request)))
            self._news.append((job, event))

    def _end_finished(self) -> None:
        for job in [each for each in self._jobs.values() if each.request.generation is not None]:
            request, end = job.request, job.request.generation
            self.metrics.ended.labels(job.name, end.finish_reason).inc()
            self.metrics.count(job.name, "prompt", request.sequence)
            if end.stats.tokens_seen:
                self.metrics.count(job.name, "end", end.stats)
            if request.error is not None or end.finish_reason == "abort":
                told = f"the request has failed: {request.error or 'it was aborted'}"
                end = APIError(500, told, None, "generation_failed")
            self._close(job, end)

    def _close(self, job: Job, end: APIError | Generation) -> None:
        del self._jobs[job.number]
        self._news.append((job, end))

    def _tell(self) -> None:
        """Hand news to the event loop, all of a step at once: to wake it costs more than a token."""
        news, self._news = self._news, []
        if news and (loop := news[0][0].loop) is not None:
            with contextlib.suppress(RuntimeError):  # the server has closed it
                loop.call_soon_threadsafe(self._hand_out, news)

    def _hand_out(self, news: list[News]) -> None:
        for job, each in news:
            if isinstance(each, (Generation, APIError)):
                self.num_unfinished[job.name] -= 1
            job.news.put_nowait((job, each))  # type: ignore[union-attr]


def longest_of(engine: Engine) -> int:
    """Return the tokens of the longest sequence that the model allows and the memory is expected to hold."""
    cache, limit = engine.cache, context_length(engine.model.config)
    if cache.grows:
        return limit
    return bisect.bisect_right(range(1, limit + 1), cache.allocator.num_blocks, key=cache.blocks_for)
