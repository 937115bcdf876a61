"""Random operations on an engine that is short of memory, against requests that ran alone."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dmc import Engine, SamplingParams, policies
from dmc.budget import Budget
from dmc.runtime.allocator import OutOfBlocksError
from dmc.runtime.model_view import layout_of

BLOCK = 16
MOST_TOKENS = 5 * BLOCK  # that the memory holds, nothing merged
EXPECTED = {"target_ratio": 3.0}  # gates are let in by this and come to about 2; some sequences outgrow the memory
HALF = Budget(ratio=2)
METHODS = {
    "full cache": None,
    "merge": EXPECTED,
    "merge, exact": {"window_size": None, **EXPECTED},
    "drop": {"action": "drop", "delay": 4, **EXPECTED},
    "evicts while generating": policies.H2O(budget=HALF),
    "evicts from prompts, by layer and head": policies.LAVa(budget=Budget(ratio=4), window=4),
    "merges what it evicts": policies.D2O(budget=HALF),
}
PROMPT_LENGTHS = (1, 3, 9, 16, 24, 40, 70, 75)  # the last two begin alike
PARAMS = [
    SamplingParams(max_new_tokens=1, temperature=0),
    SamplingParams(max_new_tokens=6, temperature=0),
    SamplingParams(max_new_tokens=18, temperature=0),
    SamplingParams(max_new_tokens=12, seed=5),
    SamplingParams(max_new_tokens=9, seed=6, top_k=9, top_p=0.9),
    SamplingParams(max_new_tokens=25, seed=7, temperature=0.7, stop_token_ids=tuple(range(0, 83, 9))),
    SamplingParams(max_new_tokens=100, temperature=0),
    SamplingParams(max_new_tokens=10, seed=8, n=3),
]
LENGTH, PARAM = st.sampled_from(PROMPT_LENGTHS), st.sampled_from(PARAMS)
ENGINES = [
    {"token_budget": None},
    {"prefill_chunk_size": 5, "token_budget": 12},
    {"prefill_chunk_size": 16, "token_budget": 4},
    {"max_batch_size": 2},
    {"memory": None},  # grows
    {"prefix_cache": True},
    {"prefix_cache": True, "prefill_chunk_size": 16, "max_batch_size": 2},
    {"prefix_cache": True, "memory": None},
]


Turns = tuple[tuple[tuple[int, ...], SamplingParams | None], ...]
"""Prompt and parameters of each turn of a conversation; None: it was fed and not answered."""


class Alone:
    """The naive model: what the last turn of a conversation brings on an engine of its own, remembered.

    A generation, or the stats of what was fed.
    """

    def __init__(self, model, policy):
        self.model, self.policy = model, policy
        self.known, self.resting = {}, {}

    def __call__(self, turns):
        if turns not in self.known:
            session = self.resting.pop(turns[:-1], None) or self.replayed(turns[:-1])
            self.known[turns] = self.take(session, *turns[-1])
            self.resting[turns] = session
        return self.known[turns]

    def replayed(self, turns):
        session = Engine(self.model, policy=self.policy, max_batch_size=1).session()
        for turn in turns:
            self.take(session, *turn)
        return session

    @staticmethod
    def take(session, prompt, params):
        return session.feed(list(prompt)) if params is None else session.generate(list(prompt), params)


@dataclass
class Conversation:
    """What a session has seen: turns that were answered, and the prompts that have been aborted since."""

    turns: Turns = ()
    unanswered: tuple[int, ...] = ()
    """They stay in the cache, and the next turn's prompt goes on from there."""
    tokens: list[int] = field(default_factory=list)


class Turn:
    """A request in flight and what the naive model says of it."""

    def __init__(self, request, turns, expected, session):
        self.request, self.turns, self.expected, self.session = request, turns, expected, session
        self.every = [[] for _ in expected]

    @property
    def tokens(self):
        """Of the first continuation."""
        return self.every[0]


class Operations(RuleBasedStateMachine):
    """Every rule is one operation; the naive model follows."""

    def __init__(self, model, alone, prompts, count):
        super().__init__()
        self.model, self.alone, self.prompts, self.count = model, alone, prompts, count
        self.engine = None
        self.turns = []
        self.histories = {}
        self.fed = self.lost = 0
        """Tokens that were fed, and those of them that the scheduler's own preemptions took back."""
        self.is_forced = False

    @precondition(lambda self: self.engine is None)
    @rule(options=st.sampled_from(ENGINES))
    def start(self, options):
        layout = layout_of(self.model, self.alone.policy)
        memory = MOST_TOKENS // BLOCK * layout.num_layers * layout.num_kv_heads * layout.block_bytes(BLOCK)
        options = {"max_batch_size": 4, "memory": memory, **options}
        self.engine = Engine(self.model, policy=self.alone.policy, **options)
        scheduler, runner = self.engine._scheduler, self.engine._runner
        forward, preempt, open_row = runner.forward, scheduler._preempt_youngest, self.engine.cache.open_row

        def count_fed(chunks):
            self.fed += sum(len(chunk.tokens) for chunk in chunks)
            return forward(chunks)

        def count_lost():
            self.lost += 0 if self.is_forced else scheduler.running[-1].num_computed_tokens
            preempt()

        def count_hits(snapshot=None):
            self.count["prefix hit"] += snapshot is not None
            self.fed += 0 if snapshot is None else snapshot.tokens_seen
            return open_row(snapshot)

        runner.forward, scheduler._preempt_youngest, self.engine.cache.open_row = count_fed, count_lost, count_hits

    @property
    def busy(self):
        return {turn.session for turn in self.turns}

    def is_too_long(self, num_tokens):
        ratio = self.engine.cache.expected_ratio
        return not self.engine.cache.grows and math.ceil(num_tokens / ratio) > MOST_TOKENS

    @contextmanager
    def events_of_others(self):
        """Check what comes for the turns in flight while the engine steps by itself."""
        engine, accepted = self.engine, []
        step = engine.step

        def noted():
            accepted.extend(events := step())
            return events

        engine.step = noted
        try:
            yield
        finally:
            del engine.step
            self.check_events(accepted)

    def begin(self, prompt, params, session):
        history = Conversation() if session is None else self.histories[session]
        params = replace(params, n=1) if session is not None else params
        if self.is_too_long(len(history.tokens) + len(prompt) + params.max_new_tokens - 1):
            self.count["refused"] += 1
            with pytest.raises(ValueError, match="may need"):
                self.engine.submit(prompt, params, session)
            return
        request = self.engine.submit(prompt, params, session)
        turns = (*history.turns, ((*history.unanswered, *prompt), replace(params, n=1)))
        sampling = turns[-1][1]
        seeds = [replace(sampling, seed=None if sampling.seed is None else sampling.seed + i) for i in range(params.n)]
        expected = [self.alone((*turns[:-1], (turns[-1][0], sampling_of_one))) for sampling_of_one in seeds]
        self.turns.append(Turn(request, turns, expected, session))
        history.tokens += prompt

    @precondition(lambda self: self.engine is not None and len(self.turns) < 8)
    @rule(
        requests=st.lists(st.tuples(st.sampled_from(PROMPT_LENGTHS), st.sampled_from(PARAMS)), min_size=1, max_size=4)
    )
    def submit(self, requests):
        for length, params in requests:
            self.count["submit"] += 1
            self.begin(self.prompts[length], params, None)

    @precondition(lambda self: self.engine is not None and len(self.histories) < 3)
    @rule()
    def open_session(self):
        self.count["open session"] += 1
        self.histories[self.engine.session()] = Conversation()

    @precondition(lambda self: self.histories)
    @rule(which=st.integers(0, 2), length=LENGTH, params=PARAM)
    def take_turn(self, which, length, params):
        self.count["turn"] += 1
        session = list(self.histories)[which % len(self.histories)]
        if any(turn.session is session for turn in self.turns):
            with pytest.raises(ValueError, match="last turn has not finished"):
                self.engine.submit(self.prompts[length], params, session)
        else:
            self.begin(self.prompts[length], params, session)

    @precondition(lambda self: any(session not in self.busy for session in self.histories))
    @rule(which=st.integers(0, 2), length=LENGTH)
    def feed(self, which, length):
        """A session takes a context without an answer; the tokens of others come all the same."""
        free = [session for session in self.histories if session not in self.busy]
        session, prompt = free[which % len(free)], self.prompts[length]
        history = self.histories[session]
        if self.is_too_long(len(history.tokens) + length):
            self.count["refused"] += 1
            with pytest.raises(ValueError, match="may need"):
                session.feed(prompt)
            return
        self.count["feed"] += 1
        history.turns = (*history.turns, ((*history.unanswered, *prompt), None))
        history.unanswered, history.tokens = (), history.tokens + prompt
        try:
            with self.events_of_others():
                stats = session.feed(prompt)
        except OutOfBlocksError:  # the prompt is a part of the conversation all the same
            self.count["outgrown"] += 1
            history.turns, history.unanswered = history.turns[:-1], history.turns[-1][0]
            return
        expected = self.alone(history.turns)
        assert torch.equal(stats.slots, expected.slots)
        assert stats.tokens_seen == expected.tokens_seen == len(history.tokens) == len(session.tokens)

    @precondition(lambda self: len(self.histories) > 1)
    @rule(which=st.integers(0, 2))
    def close_session(self, which):
        self.count["close session"] += 1
        session = list(self.histories)[which % len(self.histories)]
        session.close()
        for turn in [turn for turn in self.turns if turn.session is session]:
            self.check_aborted(turn)
        del self.histories[session]

    @precondition(lambda self: self.turns)
    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.count["step"] += 1
            self.check_events(self.engine.step())
            self.blocks_are_what_the_slots_need()

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 10))
    def finish(self, which):
        turn = self.turns[which % len(self.turns)]
        while turn in self.turns:
            self.count["step"] += 1
            self.check_events(self.engine.step())

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 10))
    def abort(self, which):
        self.count["abort"] += 1
        turn = self.turns[which % len(self.turns)]
        self.engine.abort(turn.request)
        self.check_aborted(turn)

    @precondition(lambda self: self.engine is not None and len(self.engine._scheduler.running) > 1)
    @rule()
    def preempt(self):
        self.count["preempt"] += 1
        self.is_forced = True
        self.engine._scheduler._preempt_youngest()
        self.is_forced = False

    @precondition(lambda self: self.engine is not None and self.engine._scheduler.resting)
    @rule()
    def evict(self):
        self.count["evict"] += 1
        self.engine._scheduler._evict_another(None)

    @precondition(lambda self: self.turns)
    @rule(length=st.sampled_from(PROMPT_LENGTHS[:4]))
    def score(self, length):
        """Scoring runs beside the requests; their tokens come all the same."""
        self.count["score"] += 1
        generation = self.alone(((tuple(self.prompts[length]), PARAMS[1]),))
        with self.events_of_others():
            (scores,) = self.engine.score([self.prompts[length]], [generation.token_ids])
        assert scores.argmax(-1).tolist() == generation.token_ids

    @precondition(lambda self: self.turns and len(self.turns) % 4 == 3)
    @rule()
    def interrupt(self):
        """An exception between the last layer and the end of the pass."""
        self.count["interrupt"] += 1

        def fail(*_):
            raise KeyboardInterrupt

        hook = self.model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            self.engine.step()
        hook.remove()
        assert self.engine.blocks_in_use == 0
        for turn in list(self.turns):
            self.check_aborted(turn)

    def check_events(self, events):
        of = {turn.request: turn for turn in self.turns}
        for event in events:
            of[event.request].every[event.number].append(event.token_id)
        for turn in [turn for turn in self.turns if turn.request.generation is not None and turn.request.error is None]:
            every = [turn.request.generation, *turn.request.generation.alternatives]
            self.count["fork"] += len(every) - 1
            for generation, tokens, expected in zip(every, turn.every, turn.expected, strict=True):
                assert generation.token_ids == tokens == expected.token_ids
                assert generation.finish_reason == expected.finish_reason
                assert generation.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
                assert torch.equal(generation.stats.slots, expected.stats.slots)
                assert generation.stats.tokens_seen == expected.stats.tokens_seen
                self.count["preempted"] += generation.stats.num_preemptions
            self.leave(turn)
        for turn in [turn for turn in self.turns if turn.request.generation is not None]:
            self.count["outgrown"] += 1
            assert isinstance(turn.request.error, OutOfBlocksError)
            self.check_cut_short(turn, "error")

    def check_aborted(self, turn):
        self.check_cut_short(turn, "abort")

    def check_cut_short(self, turn, reason):
        generation = turn.request.generation
        assert generation is not None
        every = [generation, *generation.alternatives]
        assert reason in [generation.finish_reason for generation in every]
        for answer, tokens, expected in zip(every, turn.every, turn.expected, strict=len(every) > 1):
            assert answer.token_ids == tokens == expected.token_ids[: len(tokens)]
        self.leave(turn)

    def leave(self, turn):
        self.turns.remove(turn)
        if turn.session is not None:
            history = self.histories[turn.session]
            history.tokens += turn.tokens
            assert turn.session.tokens == history.tokens
            prompt, params = turn.turns[-1]
            history.unanswered = () if turn.tokens else prompt
            if turn.tokens:
                history.turns = (*turn.turns[:-1], (prompt, replace(params, max_new_tokens=len(turn.tokens))))

    @invariant()
    def blocks_are_what_the_slots_need(self):
        if self.engine is None:
            return
        cache, scheduler = self.engine.cache, self.engine._scheduler
        counts = -(-cache.lengths // BLOCK)
        owned = cache.block_tables[torch.arange(cache.block_tables.shape[-1]) < counts[..., None]].tolist()
        assert self.engine.blocks_in_use == len({*owned})
        prefixes = [prefix.states for prefix in self.engine._prefixes or ()]
        kept = [cache._blocks_of(prefix["block_tables"], prefix["lengths"]).tolist() for prefix in prefixes]
        holders = Counter(owned) + sum(map(Counter, kept), Counter())
        assert all(
            holders[block] == extra + 1 for block, extra in enumerate(cache.allocator.extra.tolist()) if holders[block]
        )
        everything = [*holders, *cache.allocator.stack[: cache.allocator.num_free].tolist()]
        assert sorted(everything) == list(range(cache.allocator.num_blocks))  # none lost, none free that is held
        rows = [sequence.row for sequence in (*scheduler.running, *scheduler.resting)]
        assert len({*rows}) == len(rows) == len(cache.tokens_seen) - cache.num_free_rows

    def teardown(self):
        while self.turns:
            self.count["step"] += 1
            self.check_events(self.engine.step())
        for session in self.histories:
            session.close()
        assert self.engine is None or self.engine.blocks_in_use == 0
        assert self.fed <= 3 * (self.fed - self.lost)
        self.count["fed"] += self.fed
        self.count["lost"] += self.lost


def run(model, policy, make_prompts, **profile):
    alone, count = Alone(model, policy), Counter()
    prompts = dict(zip(PROMPT_LENGTHS, make_prompts(*PROMPT_LENGTHS), strict=True))
    prompts[75][:66] = prompts[70][:66]
    chosen = settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), **profile
    )
    run_state_machine_as_test(lambda: Operations(model, alone, prompts, count), settings=chosen)
    return count


pytestmark = pytest.mark.filterwarnings("ignore:window=", "ignore:sinks=")  # that do not fit a short prompt's budget


@pytest.fixture(autouse=True)
def small_first_pool(monkeypatch):
    monkeypatch.setattr("dmc.runtime.block_pool.FIRST_POOL_BLOCKS", 4)


def build(method, make_stock, make_compressed):
    """Return a model and its policy, if there is one."""
    chosen = METHODS[method]
    if isinstance(chosen, dict):
        return make_compressed(gates=chosen, num_layers=1), None
    return make_stock(num_layers=1 if chosen is None else 2), chosen


@pytest.mark.parametrize("method", ["full cache", "merge"])
def test_some_operations_agree_with_requests_alone(method, make_stock, make_compressed, make_prompts):
    total = run(*build(method, make_stock, make_compressed), make_prompts, max_examples=6, stateful_step_count=30)
    assert all(total[name] for name in ("submit", "turn", "abort", "preempted", "prefix hit", "fork")), total


@pytest.mark.slow
def test_five_thousand_operations_agree_with_requests_alone(make_stock, make_compressed, make_prompts):
    total = Counter()
    for method in METHODS:
        total += run(*build(method, make_stock, make_compressed), make_prompts, max_examples=8, stateful_step_count=40)

    results = ("refused", "preempted", "outgrown", "prefix hit", "fork", "fed", "lost")
    done = {name: number for name, number in total.items() if name not in results}
    assert sum(done.values()) >= 5_000, total
    assert all(number >= 8 for number in done.values()), total
    assert total["preempted"] >= 50, total
    assert total["refused"] >= 20 and total["outgrown"] >= 20, total
    assert total["prefix hit"] >= 20 and total["fork"] >= 50, total
