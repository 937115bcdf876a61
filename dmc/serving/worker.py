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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from dmc.compression.full_attention import context_length
from dmc.ranks import Ranks
from dmc.runtime import Engine, FrozenSession, Generation, GenerationStats, SamplingParams, Session, TokenEvent
from dmc.serving.metrics import Metrics
from dmc.serving.requests import APIError, bad_value

logger = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 20.0
"""The first rank sends the others a message at least this often; without one their collective would time out."""
GAUGE_SECONDS = 0.5
"""Minimum time between two updates of the engines' gauges while requests run."""
SNAPSHOT_SECONDS = 0.1
"""Minimum time between two reports of a running request's cache; each waits for the device."""
JobEvent = tuple["Job", TokenEvent | GenerationStats | Generation | APIError]


def engines_stopped() -> APIError:
    """Return the error of requests whose engines have stopped."""
    return APIError(503, "the engines have stopped", None, "engine_stopped")


class ServedCache:
    """A carried cache that requests go on from, each by itself; it stays in memory.

    Args:
        engine: engine that serves its model.
        folder: what `Engine.save` has written.
    Raises:
        ValueError, OSError: see `Engine.load`; or there is no room for it.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._frozen = self._read()
        self.num_tokens = len(self._frozen.tokens)
        self.blocks_to_share = self._frozen.blocks_to_share
        """Blocks that a request which goes on from it needs for itself at first, at most."""

    def _read(self) -> FrozenSession:
        session = self._engine.load(self._folder)
        if session.sequence.row is None:
            raise ValueError(
                f"caches: the {len(session.tokens)} tokens of {self._folder} do not fit into what is left of memory=: "
                "give more, or load fewer caches"
            )
        return session.freeze()

    def session(self) -> Session:
        """Return a session that goes on from it; what a failed pass has emptied is read again."""
        if self._frozen.is_lost:
            try:
                self._frozen = self._read()
            except (ValueError, OSError):  # the session is computed from its tokens
                logger.warning("%s cannot be read again: its tokens are computed anew", self._folder, exc_info=True)
        return self._frozen.session()


@dataclass(eq=False)
class Job:
    """One prompt of a client's request, and the queue of its token events, stats, and final generation or error."""

    model: str
    prompt: list[int]
    params: SamplingParams
    index: int
    events: asyncio.Queue[JobEvent] | None
    loop: asyncio.AbstractEventLoop | None
    """`events` and `loop` are None on ranks that receive no requests."""
    question_tokens: int = 0
    """Number of last tokens that are computed after a policy has compressed the tokens before them."""
    cache_id: str | None = None
    """Name of the carried cache that the prompt follows."""
    num_carried: int = 0
    """Tokens of that cache."""
    reports_cache: bool = False
    """Whether the client asked for the cache's contents while tokens are generated."""
    job_id: int = -1
    request: Any = None
    """The engine's request; None: not submitted yet."""
    session: Session | None = None
    """Goes on from the carried cache."""
    arrival_time: float = field(default_factory=time.monotonic)
    last_token_time: float = 0.0
    last_snapshot_time: float = 0.0


class Worker:
    """Steps all engines in one thread; on several ranks, one thread each makes the same steps.

    Args:
        engines: engines by served name; they may share models.
        max_waiting: maximum number of waiting requests per name.
        ranks: ranks over which the models are split; the first one receives requests.
        caches: folders of carried caches, by name for each served name.
    Raises:
        ValueError, OSError: see `Engine.load`.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        max_waiting: int,
        ranks: Ranks | None = None,
        caches: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self.engines, self.metrics, self.ranks = engines, Metrics(), ranks or Ranks()
        self.caches = {
            model: {name: ServedCache(engine, Path(folder)) for name, folder in caches.get(model, {}).items()}
            for model, engine in engines.items()
        }
        self._max_model_len = {model: max_model_len(engine, self.caches[model]) for model, engine in engines.items()}
        self.num_unfinished = dict.fromkeys(engines, 0)
        self.failure: BaseException | None = None
        """Error with which the thread has ended; None: it runs."""
        self._max_unfinished = {model: engine.cache.num_free_rows + max_waiting for model, engine in engines.items()}
        self._inbox: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        """New jobs, ids of jobs to abort, and None to stop the thread."""
        self._jobs: dict[int, Job] = {}
        self._events: list[JobEvent] = []
        """Events that the event loop has not received yet."""
        self._job_ids, self._last_gauge_time = itertools.count(), 0.0
        self._thread = threading.Thread(target=self.run, name="engines", daemon=True)

    def max_model_len(self, model: str, cache_id: str | None = None) -> int:
        """Return the longest sequence that fits, of a plain request or of one that goes on from a carried cache."""
        return self._max_model_len.get(model, {}).get(cache_id, 0)

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
        model = jobs[0].model
        if self.num_unfinished[model] + len(jobs) > max(self._max_unfinished[model], len(jobs)):
            message = f"{self.num_unfinished[model]} requests run or wait for {model!r}: try again later"
            raise APIError(429, message, None, "rate_limit_exceeded")
        self.num_unfinished[model] += len(jobs)
        for job in jobs:
            job.job_id = next(self._job_ids)
            self._inbox.put(job)
        if self.failure is not None:  # the thread empties the inbox after it has set `failure`, not before
            raise engines_stopped()

    def abort(self, jobs: Sequence[Job]) -> None:
        """Abort prompts whose client has disconnected; finished ones are ignored."""
        for job in jobs:
            self._inbox.put(job.job_id)

    def run(self) -> None:
        """Handle the inbox and step the engines while requests run, until `stop` is called."""
        failure: BaseException = RuntimeError("the server stops")
        try:
            while all(self._handle(message) for message in self._receive()):
                for model in {job.model: None for job in self._jobs.values()}:
                    self._step(model, self.engines[model])
                self._finish_jobs()
                self._publish()
                if not self._jobs or time.monotonic() - self._last_gauge_time > GAUGE_SECONDS:
                    self._last_gauge_time = time.monotonic()
                    for model, engine in self.engines.items():
                        self.metrics.count(model, "engine", engine)
        except BaseException as error:
            logger.exception("the engines have stopped")
            failure = error
        self.failure = failure
        while not self._inbox.empty():
            if isinstance(job := self._inbox.get(), Job):
                self._jobs[job.job_id] = job
        for job in [*self._jobs.values()]:
            self._close(job, engines_stopped())
        self._publish()

    def _receive(self) -> list[Job | int | None]:
        """Return the inbox's messages, waiting for one if nothing runs; all ranks return the same."""
        messages: list[Job | int | None] = []
        if self.ranks.rank == 0:
            wait, timeout = not self._jobs, HEARTBEAT_SECONDS if self.ranks.size > 1 else None
            with contextlib.suppress(queue.Empty):
                while True:
                    messages.append(self._inbox.get(block=wait and not messages, timeout=timeout))
        if self.ranks.size > 1:
            sent = [
                replace(message, events=None, loop=None) if isinstance(message, Job) else message
                for message in messages
            ]
            dist.broadcast_object_list(box := [sent], src=0, group=self.ranks.group)
            return messages if self.ranks.rank == 0 else box[0]
        return messages

    def _handle(self, message: Job | int | None) -> bool:
        """Submit or abort a job; return False if the thread shall stop."""
        if isinstance(message, Job):
            job, engine = message, self.engines[message.model]
            self._jobs[job.job_id] = job
            end = len(job.prompt)
            if engine.policy is not None:  # only policies compress at a prompt's end
                end -= min(job.question_tokens, end - 1)
            try:
                if job.cache_id is not None:
                    job.session = self.caches[job.model][job.cache_id].session()
                job.request = engine.submit(job.prompt[:end], job.params, job.session, after=job.prompt[end:])
            except Exception as error:  # every rank raises the same error
                self._close(job, bad_value(error))
        elif message is not None and (aborted := self._jobs.get(message)) is not None:
            self.engines[aborted.model].abort(aborted.request)
        return message is not None

    def _step(self, model: str, engine: Engine) -> None:
        try:
            events = engine.step()
        except Exception:  # the engine has ended its own requests; other engines continue
            logger.exception("a step of an engine has failed")
            return
        now, jobs = time.monotonic(), {id(job.request): job for job in self._jobs.values()}
        for event in events:
            if (job := jobs.get(id(event.request))) is None:
                continue
            self.metrics.count(model, "token", 1)
            moment, since = ("later", job.last_token_time) if job.last_token_time else ("first", job.arrival_time)
            self.metrics.count(model, moment, now - since)
            job.last_token_time = now
            if job.reports_cache and self.ranks.size == 1 and now - job.last_snapshot_time > SNAPSHOT_SECONDS:
                job.last_snapshot_time = now
                self._events.append((job, engine.stats(event.request)))
                events += engine.settled_events()  # of a step that `stats` has read: this loop takes them too
            self._events.append((job, event))

    def _finish_jobs(self) -> None:
        for job in [job for job in self._jobs.values() if job.request.generation is not None]:
            request, generation = job.request, job.request.generation
            self.metrics.finished.labels(job.model, generation.finish_reason).inc()
            self.metrics.count(job.model, "prompt", request.sequence)
            if generation.stats.tokens_seen:
                self.metrics.count(job.model, "end", generation.stats)
            if request.error is not None or generation.finish_reason == "abort":
                message = f"the request has failed: {request.error or 'it was aborted'}"
                self._close(job, APIError(500, message, None, "generation_failed"))
            else:
                self._close(job, generation)

    def _close(self, job: Job, result: APIError | Generation) -> None:
        del self._jobs[job.job_id]
        if job.session is not None and self.failure is None:
            job.session.close()
        self._events.append((job, result))

    def _publish(self) -> None:
        """Send events to the event loop, all of a step at once: waking it costs more than a token."""
        events, self._events = self._events, []
        if events and (loop := events[0][0].loop) is not None:
            with contextlib.suppress(RuntimeError):  # the server has closed it
                loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[JobEvent]) -> None:
        for job, event in events:
            if isinstance(event, (Generation, APIError)):
                self.num_unfinished[job.model] -= 1
            job.events.put_nowait((job, event))  # type: ignore[union-attr]


def max_model_len(engine: Engine, caches: Mapping[str, ServedCache]) -> dict[str | None, int]:
    """Return the lengths of the longest sequences that the model allows and the memory is expected to hold.

    Args:
        engine: holds nothing but these caches.
        caches: carried caches by name; they leave less room.
    Returns:
        By the cache that a request goes on from; None: it begins a text.
    """
    cache, limit = engine.cache, context_length(engine.model.config)
    longest: dict[str | None, int] = dict.fromkeys((None, *caches), limit)
    if not cache.grows:
        left = cache.allocator.num_blocks - cache.allocator.num_in_use
        longest[None] = bisect.bisect_right(range(1, limit + 1), left, key=cache.blocks_for)
        for name, carried in caches.items():
            new, room = range(1, limit + 1 - carried.num_tokens), left - carried.blocks_to_share
            longest[name] = carried.num_tokens + bisect.bisect_right(new, room, key=cache.blocks_for)
    return longest
