"""The thread that runs the engines: requests come in through a queue, tokens go out through one each."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from dmc.full_attention import context_length
from dmc.ranks import Ranks
from dmc.runtime import Engine, Generation, GenerationStats, Request, SamplingParams, TokenEvent
from dmc.serving.metrics import Metrics

logger = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 20.0
"""Other ranks hear from the first at least so often, or they would take it for dead."""
SNAPSHOT_SECONDS = 0.1
"""What a running request holds is told no more often than that: each time waits for the device."""


class Busy(Exception):
    """As many requests wait as may."""


class Command(NamedTuple):
    """What every rank does before the next pass; None as parameters takes the request off."""

    number: int
    name: str = ""
    prompt: Sequence[int] = ()
    params: SamplingParams | None = None
    question_tokens: int = 0


@dataclasses.dataclass(eq=False)
class Job:
    """One prompt of a client's request, and where its news goes: events, stats, at last its generation or an error."""

    name: str
    prompt: list[int]
    params: SamplingParams
    index: int
    news: asyncio.Queue[tuple[Job, Any]]
    loop: asyncio.AbstractEventLoop
    question_tokens: int = 0
    watched: bool = False
    """Whether the client wants to know what the cache holds as it grows."""
    number: int = -1
    request: Request | None = None
    begin: float = dataclasses.field(default_factory=time.monotonic)
    last: float = 0.0
    """When its last token came."""
    told: float = 0.0
    """When was told what it holds."""


class Worker:
    """Steps all engines in one thread of its own, or in the threads of all ranks alike.

    Args:
        engines: by the names under which clients know them; they may share models.
        max_waiting: requests beyond those that run, of one name.
        metrics: what is counted.
        group: of the ranks that share the models; the first one takes requests.
    """

    def __init__(
        self, engines: dict[str, Engine], max_waiting: int, metrics: Metrics, group: Ranks | None = None
    ) -> None:
        self.engines, self.metrics, self.ranks = engines, metrics, group or Ranks()
        self.longest = {name: longest_of(engine) for name, engine in engines.items()}
        self.num_unfinished = dict.fromkeys(engines, 0)
        self.failure: BaseException | None = None
        """Why the thread has ended."""
        self._most = {name: engine.cache.num_free_rows + max_waiting for name, engine in engines.items()}
        self._lock = threading.Lock()
        """Of what clients' threads and this one change: the two above, and who may put into the inbox."""
        self._inbox: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        """New jobs, numbers of those to take off, or None: the end."""
        self._jobs: dict[int, Job] = {}
        self._requests: dict[int, tuple[str, Request]] = {}
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self.run, name="engines", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self) -> None:
        """Take all requests off, let the other ranks go and wait for the thread's end."""
        self._inbox.put(None)
        self._thread.join(timeout=60)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the prompts of one request, all or none.

        Raises:
            Busy: too many wait already.
            RuntimeError: the thread has ended.
        """
        with self._lock:
            if self.failure is not None:
                raise RuntimeError(f"the engines have stopped: {self.failure}")
            name = jobs[0].name
            if self.num_unfinished[name] + len(jobs) > max(self._most[name], len(jobs)):
                raise Busy(f"{self.num_unfinished[name]} requests run or wait for {name!r}: try again later")
            self.num_unfinished[name] += len(jobs)
            for job in jobs:
                job.number = next(self._numbers)
                self._inbox.put(job)

    def abort(self, jobs: Sequence[Job]) -> None:
        """Take prompts off whose client has gone; nothing if they have ended."""
        for job in jobs:
            self._inbox.put(job.number)

    def run(self) -> None:
        """Obey commands and step while anything runs, until told to stop."""
        end: BaseException = RuntimeError("the server stops")
        try:
            while self._obey(self._next_commands()):
                for name, engine in self.engines.items():
                    if any(mine == name for mine, _ in self._requests.values()):
                        self._tell(name, self._step(engine))
                self._end_finished()
                for name, engine in self.engines.items():
                    self.metrics.look_at(name, engine, is_idle=not self._requests)
        except BaseException as error:
            logger.exception("the engines have stopped")
            end = error
        with self._lock:  # nobody puts another job in after that
            self.failure = end
        while not self._inbox.empty():
            if isinstance(job := self._inbox.get(), Job):
                self._jobs[job.number] = job
        for job in [*self._jobs.values()]:
            self._close(job, RuntimeError("the engines have stopped"))

    def _next_commands(self) -> list[Command | None]:
        commands: list[Command | None] = []
        if self.ranks.rank == 0:
            wait = not self._requests
            timeout = HEARTBEAT_SECONDS if self.ranks.size > 1 else None
            while True:
                try:
                    each = self._inbox.get(block=wait, timeout=timeout)
                except queue.Empty:
                    break
                wait = False
                if isinstance(each, Job):
                    self._jobs[each.number] = each
                    commands.append(Command(each.number, each.name, each.prompt, each.params, each.question_tokens))
                else:
                    commands.append(None if each is None else Command(each))
        if self.ranks.size > 1:
            told = [commands]
            dist.broadcast_object_list(told, src=0, group=self.ranks.group)
            commands = told[0]
        return commands

    def _obey(self, commands: list[Command | None]) -> bool:
        """Submit and abort; False: it is over."""
        for command in commands:
            if command is None:
                for name, request in self._requests.values():
                    self.engines[name].abort(request)
                self._end_finished()
                return False
            if command.params is None:
                if command.number in self._requests:
                    name, request = self._requests[command.number]
                    self.engines[name].abort(request)
                continue
            engine, job, cut = self.engines[command.name], self._jobs.get(command.number), len(command.prompt)
            if engine.policy is not None:  # nothing else acts at a prompt's end
                cut -= min(command.question_tokens, cut - 1)
            try:
                request = engine.submit([*command.prompt[:cut]], command.params, after=[*command.prompt[cut:]])
            except Exception as error:  # every rank refuses it alike
                if job is not None:
                    self._close(job, error)
                continue
            self._requests[command.number] = command.name, request
            if job is not None:
                job.request = request
        return True

    def _step(self, engine: Engine) -> list[TokenEvent]:
        try:
            return engine.step()
        except Exception:  # not of a pass: it has taken all its requests off, others go on
            logger.exception("an engine has lost its requests")
            return []

    def _tell(self, name: str, events: list[TokenEvent]) -> None:
        if self.ranks.rank:
            return
        now, jobs = time.monotonic(), {id(job.request): job for job in self._jobs.values()}
        news: dict[asyncio.AbstractEventLoop, list[tuple[Job, Any]]] = {}
        for event in events:
            if (job := jobs.get(id(event.request))) is None:
                continue
            self.metrics.count_token(name, now - (job.last or job.begin), is_first=not job.last)
            job.last = now
            if job.watched and self.ranks.size == 1 and now - job.told > SNAPSHOT_SECONDS:
                job.told = now
                held = GenerationStats.of(event.request.sequence, self.engines[name].cache)
                news.setdefault(job.loop, []).append((job, held))
            news.setdefault(job.loop, []).append((job, event))
        for loop, each in news.items():
            _put(loop, each)

    def _end_finished(self) -> None:
        for number, (name, request) in [*self._requests.items()]:
            if request.generation is None:
                continue
            del self._requests[number]
            if (job := self._jobs.get(number)) is not None:
                self.metrics.count_request(name, request)
                self._close(job, request.error or request.generation)

    def _close(self, job: Job, end: Exception | Generation) -> None:
        del self._jobs[job.number]
        with self._lock:
            self.num_unfinished[job.name] -= 1
        _put(job.loop, [(job, end)])


def _put(loop: asyncio.AbstractEventLoop, news: list[tuple[Job, Any]]) -> None:
    def hand_out() -> None:
        for job, each in news:
            job.news.put_nowait((job, each))

    try:
        loop.call_soon_threadsafe(hand_out)
    except RuntimeError:  # the server has closed it
        logger.debug("nobody listens any more")


def longest_of(engine: Engine) -> int:
    """Tokens of the longest sequence that the model is made for and the memory is expected to hold."""
    cache, limit = engine.cache, context_length(engine.model.config)
    if cache.grows:
        return limit
    return bisect.bisect_right(range(1, limit + 1), cache.allocator.num_blocks, key=cache.blocks_for)
