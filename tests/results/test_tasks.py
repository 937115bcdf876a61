"""What tasks ask: a model that reads its prompt and answers right scores 1, one that does not scores 0."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
import torch
from report_rows import CONFIGS
from runtime.test_prefix_cache import count_fed
from transformers import AutoTokenizer

from dmc import Engine, SamplingParams, load_model, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig
from dmc.data import TextSource, framing_of, train_tokenizer
from dmc.policies import H2O, LocalWindow, SnapKV, StreamingLLM
from dmc.results.compare import memory_of
from dmc.results.grid import plan_tasks
from dmc.results.tasks import (
    Breakdown,
    FactRecall,
    KeyValuePairs,
    MultiTurnRecall,
    Needle,
    SampleResult,
    TextLoss,
    TwoStageRetrieval,
    by_coordinates,
)
from dmc.results.tasks.prompts import Encoder
from dmc.results.tasks.text_loss import long_range_repeats
from dmc.runtime import GenerationStats

FILLER = "The grass is green. The sky is blue.\n"
Script = Callable[[str], str]


class ScriptedEngine(Engine):
    """Answers what a script says about all the text so far; tokens, cache and sessions are the engine's own."""

    def __init__(self, model, tokenizer, script, **options):
        super().__init__(model, tokenizer, **options)
        sample = self._core._sample

        def choose(requests, logits):
            for row, request in enumerate(requests):
                num_new = len(request.logprobs)
                tokens = request.sequence.tokens
                text = tokenizer.decode(tokens[: len(tokens) - num_new])
                answer = tokenizer(script(text), add_special_tokens=False)["input_ids"]
                logits[row] = -1e4
                logits[row, answer[num_new] if num_new < len(answer) else tokenizer.eos_token_id] = 0
            return sample(requests, logits)

        self._core._sample = choose


def find_needle(text):
    name = re.findall(r"What is the magic number of (\w+)\?", text)[-1]
    return " " + re.search(rf"magic number of {name} is (\d+)", text)[1] + ".\n"


def find_value(text):
    key = re.search(r'Key: "(.*?)".*Value: "$', text, flags=re.S)[1]
    return re.search(rf'"{key}": "(.*)"', text)[1] + '"'


def look_up(text):
    first, second = map(int, re.findall(r"(\d+) \+ (\d+)", text)[-1])
    return first + second, re.search(rf"\b{first + second}: (\w+)", text)[1]


def find_code(text):
    question = re.search(r"What is the door code of (\w+)\?", text)
    if question is None:
        return " All right 99999."
    return " " + re.search(rf"door code of {question[1]} is (\d+)", text)[1]


NEEDLE = Needle(haystack=FILLER, lengths=[144, 200], depths=[0, 0.5, 1], samples_per_place=2)
PAIRS = KeyValuePairs(lengths=[480], depths=[0, 1], samples_per_place=2)
CHAIN = TwoStageRetrieval(entries=[5, 9], samples_per_place=3)
DIRECT = TwoStageRetrieval(entries=[5, 9], samples_per_place=3, chain_of_thought=False)
TURNS = MultiTurnRecall(haystack=FILLER, turns=[2, 4], turn_tokens=24, samples_per_place=2)
SCRIPTS: dict[str, tuple[Any, Script]] = {
    "needle": (NEEDLE, find_needle),
    "key_value": (PAIRS, find_value),
    "chain": (CHAIN, lambda text: " {0}. The color of {0} is {1}.".format(*look_up(text))),
    "direct": (DIRECT, lambda text: f" {look_up(text)[1]}"),
    "turns": (TURNS, find_code),
}


@pytest.fixture(scope="module")
def model(folders):
    return load_model(folders.stock)


@pytest.fixture(scope="module")
def tokenizer(folders):
    return AutoTokenizer.from_pretrained(folders.stock)


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    """One with eight words of one token."""
    text = " alpha beta gamma delta house garden river window" * 20
    return train_tokenizer([text] * 3, 294, tmp_path_factory.mktemp("words"))


def run(task, script, model, tokenizer, **options):
    engine = ScriptedEngine(model, tokenizer, script, **options)
    results = task.evaluate(engine, task.samples(tokenizer, 300))
    assert engine.blocks_in_use == 0
    return results


def plain_losses(model, sample):
    """Feed everything at once and read the losses of the continuation off the logits."""
    tokens = torch.tensor([*sample.prompt, *sample.after, *sample.continuation])
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none").double()
    return losses[-len(sample.continuation) :]


def test_windows_of_text_are_spread_and_scored_behind_their_context(folders, tmp_path, model, tokenizer):
    task = TextLoss(TextSource(str(folders.text)), 3, 12, 20, 8, cache_folder=str(tmp_path))
    samples = task.samples(tokenizer, 300)
    stream = [*tokenizer(folders.text.read_text())["input_ids"], tokenizer.eos_token_id]
    last = len(stream) // 32 - 1
    expected = [stream[32 * index : 32 * (index + 1)] for index in (0, round(last / 2), last)]
    assert [sample.prompt + sample.continuation for sample in samples] == expected
    engine, held = Engine(model, prefill_chunk_size=7), []
    score = engine.score_with_stats
    engine.score_with_stats = lambda *given: [
        held.append(scoring.logprobs.shape) or scoring for scoring in score(*given)
    ]
    results, losses = task.evaluate(engine, samples), torch.stack([plain_losses(model, sample) for sample in samples])
    assert held == [(20,)] * 3  # and no whole vocabularies
    for sample, result, token_losses in zip(samples, results, losses, strict=True):
        assert result.metrics["loss"] == pytest.approx(float(token_losses.mean()), rel=1e-5)
        assert (len(sample.prompt), result.stats.tokens_seen, result.stats.achieved_ratio) == (12, 31, 1.0)
    table = by_coordinates(results)["by_position"]
    assert table["position"] == [12, 20, 28] and table["samples"] == [3, 3, 3]
    assert table["loss"] == pytest.approx([float(losses[:, a:b].mean()) for a, b in ((0, 8), (8, 16), (16, 20))])
    assert table["cumulative_loss"] == pytest.approx([float(losses[:, :b].mean()) for b in (8, 16, 20)])


def test_a_window_that_begins_with_a_document_has_its_beginning_once(beginning_tokenizer, folders, tmp_path):
    task = TextLoss(TextSource(str(folders.text)), 4, 16, 8, cache_folder=str(tmp_path))
    begin = list(framing_of(beginning_tokenizer).begin)
    first, *others = task.samples(beginning_tokenizer, 300)
    assert first.prompt[:1] == begin and begin[0] not in first.prompt[1:] + first.continuation
    assert all(sample.prompt[:1] == begin for sample in others)
    flat = beginning_tokenizer(folders.text.read_text(), add_special_tokens=False)["input_ids"]
    assert first.prompt[1:] + first.continuation == flat[: len(first.prompt) - 1 + 8]


def test_windows_of_one_document_belong_together(folders, tokenizer, tmp_path):
    for number, words in enumerate((60, 400, 0, 60)):
        (tmp_path / f"{number}.txt").write_text("alpha beta " * words)
    options: Any = {"context_tokens": 24, "scored_tokens": 8, "cache_folder": str(tmp_path / "cache")}
    samples = TextLoss(TextSource(str(tmp_path / "*.txt")), 1000, **options).samples(tokenizer, 300)
    ends = found = 0
    for sample in samples:  # where tokens end documents, counted one by one
        for place, token in enumerate(sample.prompt + sample.continuation):
            found = ends if place == len(sample.prompt) else found
            ends += token == tokenizer.eos_token_id
        assert sample.context == found + (found > 1)  # the empty document has no token
    assert len({sample.context for sample in samples}) == 3


def repeats(tokens, ngram, distance):
    """Walk back from each token to the last occurrence of the n-gram that it ends."""
    found = []
    for end in range(ngram - 1, len(tokens)):
        words = tokens[end - ngram + 1 : end + 1]
        before = [at for at in range(ngram - 1, end) if tokens[at - ngram + 1 : at + 1] == words]
        found += [end] if before and end - before[-1] >= distance else []
    return found


def test_loss_of_far_repeats_is_that_of_their_tokens(model, tokenizer, tmp_path):
    tokens = torch.randint(4, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for case in ((1, 4), (2, 16), (3, 40)):
        assert long_range_repeats(tokens, *case) == repeats(tokens, *case) != []
    words = "alpha beta gamma delta epsilon " * 3
    (tmp_path / "book.txt").write_text(" ".join([words, "gamma gamma alpha beta " * 20, words] * 4))
    settings = {"num_samples": 2, "context_tokens": 40, "scored_tokens": 80, "cache_folder": str(tmp_path / "cache")}
    task = TextLoss(TextSource(str(tmp_path / "book.txt")), repeat_ngram=3, repeat_distance=6, **settings)
    samples = task.samples(tokenizer, 300)
    for sample, result in zip(samples, task.evaluate(Engine(model, tokenizer), samples), strict=True):
        places = [place - 40 for place in repeats(sample.prompt + sample.continuation, 3, 6) if place >= 40]
        expected = float(plain_losses(model, sample)[places].mean())
        assert result.metrics["long_range_repeat_loss"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="no window repeats 90 tokens"):
        TextLoss(task.source, repeat_ngram=90, repeat_distance=6, **settings).samples(tokenizer, 300)


def test_memory_is_compared_over_all_scored_tokens_not_at_the_last(folders, tmp_path, model, tokenizer):
    task = TextLoss(TextSource(str(folders.text)), 2, 1, 127, cache_folder=str(tmp_path))
    samples = task.samples(tokenizer, 300)
    gates = CompressionConfig(action="drop", delay=32, decision_offset=-1e6, target_ratio=4.0)  # all but the first
    policy = StreamingLLM(budget=Budget(ratio=127 / 33), sinks=1)
    engines = Engine(retrofit(copy.deepcopy(model), gates)), Engine(model, policy=policy)
    delayed, evicted = (memory_of([result.stats for result in task.evaluate(engine, samples)]) for engine in engines)
    assert delayed["achieved_ratio"] == evicted["achieved_ratio"] == 127 / 33
    held = [min(seen, 32) + (seen > 32) for seen in range(1, 128)]
    assert delayed["mean_achieved_ratio"] == pytest.approx(sum(range(1, 128)) / sum(held))  # 2.24
    assert evicted["mean_achieved_ratio"] == pytest.approx(127 / 33, rel=0.03)
    assert delayed["peak_bytes_allocated"] == delayed["bytes_allocated_per_token"] * 127 > 0


def test_memory_of_samples_is_all_tokens_over_all_entries_and_all_bytes_over_all_tokens():
    def held(tokens, entries, size):
        slots = torch.tensor([[entries]])
        return GenerationStats(tokens, slots, 1, 1, size, size, 0, 0, tokens / 2, slots / 2, size / 4, size / 4, size)

    memory = memory_of([held(100, 100, 1000), held(900, 100, 3000)])
    assert memory["achieved_ratio"] == memory["mean_achieved_ratio"] == 1000 / 200
    sizes = [memory[f"{name}bytes_allocated_per_token"] for name in ("", "mean_")]
    assert [*sizes, memory["peak_bytes_allocated"]] == [4000 / 1000, 1000 / 500, 3000]


FACTS = FactRecall(haystack="12 34.\n", lengths=[160, 200], keys=3, num_keys=3, contexts=2, questions=2, rebinding=0.5)


def find_fact(text):
    """Read the newest fact about the key that was asked for last."""
    key = re.split(r"\nget", text)[-1].strip()
    forms = rf"(?:use {key} as|< {key}/| {key} by|% {key} \|) ([a-z]+)"
    return " " + re.findall(forms, text)[-1]


@pytest.mark.parametrize("question", ["known", "hidden"])
def test_facts_are_asked_of_one_compressed_context(question, model, word_tokenizer):
    task = dataclasses.replace(FACTS, question=question)
    samples = task.samples(word_tokenizer, 300)
    assert task.samples(word_tokenizer, 300) == samples and len(samples) == 2 * 2 * 2
    for sample in samples:
        text = word_tokenizer.decode([*sample.prompt, *sample.after])
        assert find_fact(text) == word_tokenizer.decode(sample.continuation)
        length = len(sample.prompt) + (len(sample.after) if question == "hidden" else 0)
        assert sample.coordinates["length"] == length and 0 <= sample.coordinates["depth"] <= 1
        assert (sample.prompt[-len(sample.after) :] == sample.after) == (question == "known")
    assert {result.metrics["exact_match"] for result in run(task, find_fact, model, word_tokenizer)} == {1.0}
    assert {result.metrics["exact_match"] for result in run(task, lambda _: " the", model, word_tokenizer)} == {0.0}
    engine = Engine(model, word_tokenizer)
    fed = count_fed(engine)
    results = task.evaluate(engine, samples)
    contexts = {tuple(sample.prompt): len(sample.prompt) for sample in samples}
    assert len(contexts) == (4 if question == "hidden" else 8)
    wrong = [sample for sample, result in zip(samples, results, strict=True) if not result.metrics["exact_match"]]
    assert wrong and sum(fed) == sum(contexts.values()) + sum(len(sample.after) for sample in [*samples, *wrong])


@pytest.mark.parametrize("question", ["known", "hidden"])
def test_an_answer_of_one_token_comes_from_what_the_cache_has_kept(question, model, word_tokenizer):
    task = dataclasses.replace(FACTS, question=question, contexts=3)
    full, greedy = Engine(model, word_tokenizer), SamplingParams(max_new_tokens=1, temperature=0.0)
    asked = task.samples(word_tokenizer, 300)
    wholes = [[*sample.prompt, *sample.after] for sample in asked]
    right = [generation.token_ids for generation in full.generate(wholes, greedy)]
    samples = [dataclasses.replace(sample, continuation=answer) for sample, answer in zip(asked, right, strict=True)]
    results = task.evaluate(full, samples)
    assert {result.metrics["exact_match"] for result in results} == {1.0}
    for sample, result in zip(samples, results, strict=True):
        assert result.metrics["loss"] == pytest.approx(float(plain_losses(model, sample).mean()), rel=1e-3)
    forgetful = Engine(model, word_tokenizer, policy=LocalWindow(budget=Budget(tokens=1)))
    at_once = [generation.token_ids for generation in forgetful.generate(wholes, greedy)]
    assert at_once == right  # the prompt's own pass sees everything: nothing is measured
    results = task.evaluate(forgetful, samples)
    assert fmean(result.metrics["exact_match"] for result in results) < 0.5
    assert all(result.stats.mean_slots.max() <= 2 for result in results)
    assert forgetful.blocks_in_use == full.blocks_in_use == 0


def test_questions_in_turn_follow_each_other_on_one_cache(model, word_tokenizer):
    task = dataclasses.replace(FACTS, question="in_turn")
    chats = task.samples(word_tokenizer, 300)
    forks = itertools.groupby(FACTS.samples(word_tokenizer, 300), lambda sample: sample.prompt)
    for chat, (context, samples) in zip(chats, forks, strict=True):
        asked = [*zip(chat.turns[1:], chat.answers.values(), strict=True)]
        assert chat.turns[0] == context
        assert sorted(asked) == sorted((sample.after, sample.continuation) for sample in samples)
    assert {result.metrics["exact_match"] for result in run(task, find_fact, model, word_tokenizer)} == {1.0}
    tires = run(task, lambda text: find_fact(text) if text.count("\nget") < 2 else " the", model, word_tokenizer)
    table = by_coordinates(tires)["by_turn"]
    assert {result.metrics["exact_match"] for result in tires} == {0.5}
    assert (table["turn"], table["exact_match"]) == ([2, 3], [1.0, 0.0])
    engine = Engine(model, word_tokenizer, policy=StreamingLLM(budget=Budget(tokens=32)))
    for chat in chats:
        with engine.session() as session:
            session.feed(chat.turns[0])
            first, second = (session.generate(turn, task.params()) for turn in chat.turns[1:])
        right = dataclasses.replace(chat, answers={1: first.token_ids, 2: [second.token_ids[0] + 1]})
        (result,) = task.evaluate(engine, [right])
        assert [part.metrics["exact_match"] for part in result.breakdown] == [1.0, 0.0]
        assert torch.equal(result.stats.slots, second.stats.slots)
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_who_reads_the_prompt_scores_one_and_one_who_does_not_scores_zero(name, model, tokenizer):
    task, script = SCRIPTS[name]
    assert {result.metrics["exact_match"] for result in run(task, script, model, tokenizer)} == {1.0}
    for answer in (" 1", "", " mauve", ' 31415926"'):
        assert {result.metrics["exact_match"] for result in run(task, lambda _, a=answer: a, model, tokenizer)} == {0.0}
    samples = task.samples(tokenizer, 300)
    assert samples == task.samples(tokenizer, 300)
    other = dataclasses.replace(task, seed=1).samples(tokenizer, 300)
    assert [sample.continuation for sample in other] != [sample.continuation for sample in samples]


@pytest.mark.parametrize("name", ["needle", "key_value", "chain", "direct"])
def test_the_question_is_compressed_where_it_is_known_and_comes_after_where_it_is_hidden(name, tokenizer, model):
    task, script = SCRIPTS[name]
    known, hidden = (
        dataclasses.replace(task, question=question).samples(tokenizer, 300) for question in ("known", "hidden")
    )
    assert len({tuple(sample.after) for sample in known}) == 1  # says nothing of the question
    for one, other in zip(known, hidden, strict=True):
        assert [*one.prompt, *one.after] == [*other.prompt, *other.after]  # the same conversation
        assert (one.continuation, one.coordinates) == (other.continuation, other.coordinates)
        assert one.after and other.after[-len(one.after) :] == one.after and len(other.after) > len(one.after) + 5
    results = run(dataclasses.replace(task, question="hidden"), script, model, tokenizer)
    assert {result.metrics["exact_match"] for result in results} == {1.0}


METHODS = {"h2o": H2O(budget=Budget(ratio=4)), "snapkv": SnapKV(window=4, budget=Budget(tokens=12))}


@pytest.mark.parametrize("method", ["h2o", "snapkv", "gates"])
def test_each_of_several_questions_to_a_context_is_answered_as_on_a_compressed_cache_of_its_own(
    method, folders, word_tokenizer, make_config
):
    model, policy = load_model(folders.compressed if method == "gates" else folders.stock), METHODS.get(method)
    asked = {"name": "a", "_target_": "dmc.results.tasks.FactRecall", **vars(FACTS), "question": "both", "questions": 3}
    known, hidden = plan_tasks(make_config(tasks=[asked]), CONFIGS, "x")
    assert [(benchmark.name, benchmark.task.question) for benchmark in (known, hidden)] == [
        ("a:known", "known"),
        ("a:hidden", "hidden"),
    ]
    for task in (known.task, hidden.task):
        samples = task.samples(word_tokenizer, 300)
        prompts, after = [sample.prompt for sample in samples], [sample.after for sample in samples]
        assert len(samples) == 12 and len({tuple(prompt) for prompt in prompts}) == (
            12 if task.question == "known" else 4
        )
        engine = Engine(model, word_tokenizer, policy, max_batch_size=5, prefill_chunk_size=None if policy else 50)
        together = engine.generate(prompts, task.params(), after=after)
        results = task.evaluate(engine, samples)
        assert engine.blocks_in_use == 0
        for sample, generation, result in zip(samples, together, results, strict=True):
            fresh = Engine(model, word_tokenizer, policy)
            with fresh.session() as session:
                session.feed(sample.prompt)
                alone = session.generate(sample.after, task.params())
            assert generation.token_ids == alone.token_ids
            assert generation.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            for stats in (generation.stats, result.stats):
                assert torch.equal(stats.slots, alone.stats.slots)
                assert torch.equal(stats.mean_slots, alone.stats.mean_slots)
            (scoring,) = fresh.score_with_stats([sample.prompt], [sample.continuation], after=[sample.after])
            rows = zip(scoring.logprobs, sample.continuation, strict=True)
            assert result.metrics["loss"] == pytest.approx(-fmean(float(row[token]) for row, token in rows), abs=1e-4)
            assert result.metrics.items() >= task.grade(fresh, sample.continuation, alone).items()


def test_a_fact_stands_at_its_depth_of_a_prompt_of_its_length(tokenizer):
    for sample in NEEDLE.samples(tokenizer, 300):
        assert len(sample.prompt) + len(sample.after) == sample.coordinates["length"]
        text = tokenizer.decode(sample.prompt)
        before, after = re.split(r"\nThe magic number of \w+ is \d+.\n", text.partition("\nWhat is")[0])
        sizes = [len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after)]
        assert sizes[0] / sum(sizes) == pytest.approx(sample.coordinates["depth"], abs=0.05)


def test_the_pair_asked_for_stands_at_its_depth_of_as_many_as_fit(tokenizer):
    samples = KeyValuePairs(lengths=[600], depths=[0, 0.5, 1], samples_per_place=3).samples(tokenizer, 300)
    for sample in samples:
        text = tokenizer.decode(sample.prompt)
        keys = re.findall(r'"([0-9a-f-]{36})": "[0-9a-f-]{36}",', text)
        asked = re.search(r'Key: "(.*)"', text)[1]
        assert len(keys) > 2 and len(set(keys)) == len(keys)
        assert keys.index(asked) == round(sample.coordinates["depth"] * (len(keys) - 1))
        pair = len(sample.prompt) / len(text) * len('"": "",\n' + 72 * "0")
        assert 600 - 1.3 * pair < len(sample.prompt) <= 600


def test_any_text_can_hide_a_needle(folders, tmp_path, model, tokenizer):
    options = {"lengths": [150], "depths": [0.5], "samples_per_place": 2, "cache_folder": str(tmp_path)}
    task = Needle(haystack=TextSource(str(folders.text)), **options)
    first, second = task.samples(tokenizer, 300)
    assert "gamma" in tokenizer.decode(first.prompt) and first.prompt != second.prompt and first.context == 0
    assert {result.metrics["exact_match"] for result in run(task, find_needle, model, tokenizer)} == {1.0}


def test_filler_comes_from_all_over_a_text_without_the_ends_of_its_documents(beginning_tokenizer, tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(" ".join(f"{10 * number + place:04d}" for place in range(10)))
    filler, source = Encoder(beginning_tokenizer).filler, TextSource(str(tmp_path / "*.txt"))
    every = filler(source, 40, 10**3, str(tmp_path / "cache"))
    count = every.index(every[0], 1)
    assert filler(source, 40, 3, str(tmp_path / "cache")) == [every[0], every[(count - 1) // 2], every[count - 1]]
    assert every == [every[index % count] for index in range(10**3)]  # again where there are more
    framing = framing_of(beginning_tokenizer)
    assert all(len(tokens) == 40 and not {*framing.begin, framing.end} & {*tokens} for tokens in every[:count])


def test_facts_are_asked_for_in_words_of_one_half(word_tokenizer):
    asked = []
    for words in ("first_half", "second_half"):
        task = dataclasses.replace(FACTS, keys=1, num_keys=2, questions=1, words=words)
        asked.append({(*sample.after, *sample.continuation) for sample in task.samples(word_tokenizer, 300)})
    assert [len(question) for question in asked] == [1, 1] and not asked[0] & asked[1]
    with pytest.raises(ValueError, match="keys=2: expected at most 1"):
        dataclasses.replace(FACTS, keys=2, num_keys=3, words="first_half")


@pytest.mark.parametrize(
    ("task", "script", "right"),
    [
        (NEEDLE, lambda text: find_needle(text)[:6] + "7", {"exact_match": 0.0}),  # a number that goes on is another
        (CHAIN, lambda text: f" {look_up(text)[0]}. It is mauve.", {"sum_match": 1.0, "exact_match": 0.0}),
    ],
)
def test_an_answer_that_is_right_in_parts_is_right_in_these_alone(task, script, right, model, tokenizer):
    for result in run(task, script, model, tokenizer):
        assert result.metrics.items() >= right.items()


def test_each_turn_sees_what_the_ones_before_have_left(model, tokenizer):
    seen: list[str] = []

    def note(text):
        seen.append(text)
        return find_code(text)

    results, samples = run(TURNS, note, model, tokenizer), TURNS.samples(tokenizer, 300)
    last = max(seen, key=len)
    assert last.count(" All rig") == 3 and last.startswith("The door code of")
    for result, sample in zip(results, samples, strict=True):
        assert result.stats.tokens_seen > len(sample.prompt) and result.stats.achieved_ratio == 1.0
    policy = StreamingLLM(budget=Budget(tokens=32))
    for result in run(TURNS, find_code, model, tokenizer, policy=policy, max_batch_size=4):
        assert result.stats.slots.unique().tolist() == [32]
    engine = Engine(model, tokenizer)  # alone as among others
    together, alone = TURNS.evaluate(engine, samples), [TURNS.evaluate(engine, [sample])[0] for sample in samples]
    for one, other in zip(together, alone, strict=True):
        assert (one.metrics, one.stats.tokens_seen) == (other.metrics, other.stats.tokens_seen)


def test_metrics_are_averaged_by_coordinates():
    stats = GenerationStats(0, torch.zeros(1, 1), 1, 1, 0, 0, 0, 0, 0, torch.zeros(1, 1), 0, 0, 0)
    found = [
        SampleResult({}, stats, [Breakdown({"length": length, "depth": depth}, {"match": match})])
        for length, depth, match in ((20, 0.5, 1), (10, 0, 1), (20, 0.5, 0), (10, 0.5, 0))
    ]
    table = {"length": [10, 20], "depth": [0, 0.5], "samples": [[1, 1], [0, 2]], "match": [[1, 0], [None, 0.5]]}
    assert by_coordinates(found) == {"by_length_and_depth": table}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda _: Needle(haystack=FILLER, fact="none"), "fact='none': expected {number}"),
        (lambda _: Needle(haystack=FILLER, question_text="\nWhat is it?"), "expected the beginning of the answer"),
        (lambda _: Needle(haystack=FILLER, question_text="? {name} is"), "a known question without names in braces"),
        (lambda _: NEEDLE.samples(None, 300), "needs a tokenizer"),
        (
            lambda tokenizer: Needle(haystack=FILLER, lengths=[20]).samples(tokenizer, 300),
            "lengths: 20 tokens leave no",
        ),
        (lambda tokenizer: KeyValuePairs(lengths=[60]).samples(tokenizer, 300), "no room for a single pair"),
        (lambda _: FactRecall(haystack=FILLER, keys=5, questions=6), "questions=6: expected at most the keys=5"),
        (lambda _: FactRecall(haystack=FILLER, keys=9, num_keys=8), "keys=9: expected at most 8"),
        (lambda tokenizer: FactRecall(haystack=FILLER).samples(tokenizer, 300), "keys=40: expected at most"),
        (lambda _: TextLoss(TextSource("x")).samples(None, 300), "needs a tokenizer"),
    ],
)
def test_bad_settings_are_refused_with_what_was_expected(build, message, tokenizer):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        build(tokenizer)
