"""Problems solved step by step: what the task asks, how it votes, and which bytes it counts."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.data import ChainSource, train_tokenizer
from dmc.policies import TOVA, Quest
from dmc.results.tasks import ChainReasoning, Conditions
from dmc.results.tasks.voting import voted, write_chains


@pytest.fixture
def tiny_model(make_stock):
    return make_stock(vocab_size=257, eos_token_id=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters") / "tokenizer"
    return train_tokenizer(ChainSource(problems=40).documents(), 257, folder)


class WritingEngine(Engine):
    """Writes what a function of the problem's text and the chain's number returns; all else is the engine's own."""

    def __init__(self, model, tokenizer, write, **options):
        super().__init__(model, tokenizer, **options)
        sample = self._core._sample

        def choose(requests, logits):
            for row, request in enumerate(requests):
                num_new, tokens = len(request.logprobs), request.sequence.tokens
                text = tokenizer.decode(tokens[: len(tokens) - num_new])
                written = tokenizer(write(text, request.number))["input_ids"]
                logits[row] = -1e4
                logits[row, written[num_new] if num_new < len(written) else tokenizer.eos_token_id] = 1e4
            return sample(requests, logits)

        self._core._sample = choose


def right_answer(prompt):
    """Run the program by Python."""
    given, run = prompt.split("|")
    values = {name: int(digit) for name, digit in re.findall(r"([a-zA-Z])(\d)", given)}
    for name, expression in re.findall(r"([a-zA-Z])[=:<]([a-zA-Z]\+[a-zA-Z])", run):
        values[name] = eval(f"({expression}) % 10", {}, dict(values))
    return str(values[name])


def wrong_answer(prompt):
    return next(digit for digit in "01" if digit != right_answer(prompt))


def evaluate(task, engine, tokenizer, together=4):
    samples = task.samples(tokenizer, 257)
    row, stats = task.measure(engine, samples, Conditions("", together, 0, Path()))
    return row, stats, samples


OPTIONS = {"lines": (9, 12), "problems": 3, "max_new_tokens": 12}


def test_a_writer_of_right_answers_scores_one_and_one_without_an_answer_nothing(tiny_model, tokenizer):
    task = ChainReasoning(**OPTIONS)
    for write, share, answered in (
        (lambda prompt, _: f"e=a+c:a\n?e{right_answer(prompt)}", 1, 1),
        (lambda prompt, _: f"e=a+c:a\n?e{wrong_answer(prompt)}", 0, 1),
        (lambda prompt, _: f"e=a+c:a0+c3\n?e{right_answer(prompt)}", 0, 0),  # too long
    ):
        row, stats, samples = evaluate(task, WritingEngine(tiny_model, tokenizer, write), tokenizer)
        assert row["metrics"]["exact_match"] == row["metrics"]["single_chain"] == share
        assert row["metrics"]["answered"] == answered
        assert row["metrics"]["chain_tokens"] == 12  # with the end of the text, of an answer in time
        assert row["by_lines"]["lines"] == [9, 12] and row["by_lines"]["exact_match"] == [share, share]
        assert len(stats) == len(samples) == 6
    prompts = {tuple(sample.prompt) for sample in samples}
    assert len(prompts) == 6 and {tuple(sample.after) for sample in samples} == {(tokenizer("\n")["input_ids"][0],)}


@pytest.mark.parametrize(
    ("vote", "share"), [("majority", {"rwr": 1, "rww": 0, "-r-": 1, "---": 0}), ("first", {"rwr": 1, "wrr": 0})]
)
def test_chains_vote(tiny_model, tokenizer, vote, share):
    for kinds, expected in share.items():

        def write(prompt, number, kinds=kinds):
            answer = {"r": right_answer(prompt), "w": wrong_answer(prompt), "-": "\n"}[kinds[number]]
            return "a" * (number + 1) + f"?e{answer}"

        task = ChainReasoning(chains=3, vote=vote, **OPTIONS)
        row, stats, _ = evaluate(task, WritingEngine(tiny_model, tokenizer, write), tokenizer)
        assert row["metrics"]["exact_match"] == expected
        assert row["metrics"]["single_chain"] == pytest.approx(kinds.count("r") / 3)
        assert row["metrics"]["any_chain"] == ("r" in kinds)
        assert row["metrics"]["answered"] == pytest.approx(1 - kinds.count("-") / 3)
        assert row["metrics"]["chain_tokens"] == 2 + 3 + 1
        assert len(stats) == 6 * 3


def test_the_most_frequent_answer_counts_and_of_equals_that_of_the_earliest_chain():
    draw = np.random.default_rng(0)
    for _ in range(200):
        answers = [None if letter == "-" else letter for letter in draw.choice(list("abc-"), size=5)]
        lengths = draw.permutation(5).tolist()
        given = [answer for answer in answers if answer is not None]
        expected = max(given, key=lambda answer: (given.count(answer), -given.index(answer)), default=None)
        assert voted(answers, "majority", lengths) == expected
        shortest = sorted(zip(lengths, answers, strict=True), key=lambda pair: (pair[1] is None, pair[0]))
        assert voted(answers, "first", lengths) == shortest[0][1]


@pytest.mark.parametrize("chains", [1, 3])
def test_bytes_are_those_of_all_chains_of_a_problem_and_of_all_their_steps(tiny_model, tokenizer, chains):
    engine = Engine(tiny_model, tokenizer)
    cache, prompt, new = engine.cache, list(range(40)), 30
    params = SamplingParams(max_new_tokens=new, ignore_eos=True, n=chains, seed=1)
    [found] = write_chains(engine, [prompt], [[7]], [params])
    layout = cache.layout

    def pages(tokens):
        return layout.num_layers * layout.num_kv_heads * -(-tokens // cache.block_size)

    fed = len(prompt) + new  # the last token is not fed
    shared = layout.num_layers * layout.num_kv_heads * ((len(prompt) + 1) // cache.block_size)
    peak = chains * pages(fed) - (chains - 1) * shared
    assert found.peak_bytes == peak * cache.block_bytes + chains * cache.state_bytes
    steps = range(len(prompt) + 1, fed + 1)
    once = sum(pages(tokens) * cache.block_bytes + cache.state_bytes for tokens in steps)
    assert found.bytes_read == pytest.approx(chains * once)
    assert len(steps) == new and engine.blocks_in_use == 0


@pytest.mark.parametrize("problems_in_memory", [None, 1.5, pytest.param(3.0, marks=pytest.mark.slow)])
def test_problems_that_run_together_cost_what_each_costs_alone(tiny_model, tokenizer, problems_in_memory):
    lengths, chains, memory = (100, 33, 80, 7, 51), 3, None  # the longest first: tables are nearly as wide for all
    prompts, after = [[*range(length)] for length in lengths], [[7]] * 5
    params = [SamplingParams(max_new_tokens=20 + length, n=chains, seed=length << 16) for length in lengths]
    engine = Engine(tiny_model, tokenizer)
    if problems_in_memory is not None:
        block, layout = engine.cache.block_bytes, engine.cache.layout
        memory = int(problems_in_memory * chains * layout.num_layers * layout.num_kv_heads * -(-221 // 16) * block)
        engine = Engine(tiny_model, tokenizer, memory=memory)
    together = write_chains(Engine(tiny_model, tokenizer, max_batch_size=11, memory=memory), prompts, after, params)
    for found, *asked in zip(together, prompts, after, params, strict=True):
        [alone] = write_chains(engine, *([one] for one in asked))
        assert found.peak_bytes == alone.peak_bytes
        assert found.bytes_read == pytest.approx(alone.bytes_read, rel=1e-4)
        for one, other in zip(found.generations, alone.generations, strict=True):
            assert one.token_ids == other.token_ids and one.stats.num_preemptions == 0


def test_a_policy_holds_less_and_a_reading_policy_reads_less(tiny_model, tokenizer):
    prompt, params = list(range(100)), SamplingParams(max_new_tokens=20, ignore_eos=True, n=2, seed=1)
    full, evicting, reading = (
        write_chains(Engine(tiny_model, tokenizer, policy=policy), [prompt], [[7]], [params])[0]
        for policy in (None, TOVA(budget=Budget(ratio=4)), Quest(budget=Budget(ratio=4)))
    )
    assert evicting.peak_bytes < 0.5 * full.peak_bytes and evicting.bytes_read < 0.5 * full.bytes_read
    assert reading.peak_bytes > full.peak_bytes and reading.bytes_read < 0.5 * full.bytes_read


def test_samples_of_a_problem_differ_between_chains_and_not_between_starts(tiny_model, tokenizer):
    task = ChainReasoning(chains=3, lines=(9,), problems=2, max_new_tokens=16)
    samples = task.samples(tokenizer, 257)
    written = []
    for _ in range(2):
        torch.manual_seed(len(written))
        engine = Engine(tiny_model, tokenizer)
        params = [task._params(sample) for sample in samples]
        chains = write_chains(engine, *zip(*((sample.prompt, sample.after) for sample in samples), strict=True), params)
        written.append([[generation.token_ids for generation in found.generations] for found in chains])
    assert written[0] == written[1]
    assert all(first != second for first, second in itertools.combinations(written[0][0] + written[0][1], 2))


def test_settings_are_checked():
    with pytest.raises(ValueError, match="chains=8, temperature=0: greedy chains are the same"):
        ChainReasoning(chains=8, temperature=0.0)
    with pytest.raises(ValueError, match="expected numbers from 1 to 48"):
        ChainReasoning(lines=(49,))
