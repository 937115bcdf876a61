"""RULER's tasks: a reader of the prompt finds every item, and one that does not read finds none."""

import re
from collections import Counter

import pytest
from results.test_tasks import FILLER, ScriptedEngine, model, tokenizer  # noqa: F401

from dmc.results.tasks import CommonWords, FrequentWords, Needle, RulerNeedles, VariableTracking


def find_numbers(text):
    key = re.findall(r"magic numbers for ([\w-]+) mentioned", text)[-1]
    return " " + ", ".join(re.findall(rf"magic numbers for {key} is: (\d+)", text))


def track(text):
    value = re.findall(r"assigned the value (\d+)", text)[-1]
    names, lines = [], re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text)
    for name, source in lines:  # in order: a variable comes behind what it is assigned
        names += [name] if source in (value, *names) else []
    return " " + " ".join(names)


def count_numbered(text):
    words = re.findall(r"\d+\. (\w+)", text.split("Below is")[-1])
    return " " + ", ".join(word for word, _ in Counter(words).most_common(10))


def count_coded(text):
    words = re.findall(r"\b[a-z]{6}\b", text.split("coded words.")[1].split("Question")[0])
    return " " + " ".join(word for word, _ in Counter(words).most_common(3))


TASKS = {
    "single": (RulerNeedles(lengths=[400], samples_per_place=2), find_numbers, 1),
    "multikey": (RulerNeedles(lengths=[700], samples_per_place=2, keys=4, questions=3), find_numbers, 3),
    "multivalue": (RulerNeedles(lengths=[700], samples_per_place=2, values=4, max_new_tokens=80), find_numbers, 1),
    "variables": (VariableTracking(lengths=[1500], samples_per_place=2, chains=2, max_new_tokens=80), track, 2),
    "common": (CommonWords(lengths=[2000], samples_per_place=1, max_new_tokens=200), count_numbered, 1),
    "frequent": (FrequentWords(lengths=[1200], samples_per_place=2, max_new_tokens=80), count_coded, 1),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("question", ["hidden", pytest.param("known", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:a sequence may come to")
def test_one_who_reads_finds_all_items_and_one_who_does_not_finds_none(name, question, model, tokenizer):  # noqa: F811
    task, script, asked = TASKS[name]
    task = type(task)(**{**vars(task), "question": question})
    samples = task.samples(tokenizer, 300)
    assert samples == task.samples(tokenizer, 300) != type(task)(**{**vars(task), "seed": 1}).samples(tokenizer, 300)
    (length,) = task.lengths
    for sample in samples:
        assert length - 250 < len(sample.prompt) + len(sample.after) <= length
    contexts = len({tuple(sample.prompt) for sample in samples})
    assert len(samples) == asked * task.samples_per_place
    assert contexts == (task.samples_per_place if question == "hidden" else len(samples))
    assert [sample.context for sample in samples] == sorted([*range(task.samples_per_place)] * asked)
    for right, reader in ((1.0, script), (0.0, lambda _: " qqq")):
        results = task.evaluate(ScriptedEngine(model, tokenizer, reader, max_batch_size=4), samples)
        assert [result.metrics["string_match"] for result in results] == [right] * len(samples)


def test_half_of_the_items_are_half_of_the_score(model, tokenizer):  # noqa: F811
    task = TASKS["multivalue"][0]
    engine = ScriptedEngine(model, tokenizer, lambda text: find_numbers(text)[:17])
    assert {result.metrics["string_match"] for result in task.evaluate(engine, task.samples(tokenizer, 300))} == {0.5}


def test_a_text_has_several_needles_each_at_its_depth(model, tokenizer):  # noqa: F811
    options = {"haystack": FILLER, "lengths": [300], "depths": [0, 0.2, 0.8, 1], "question": "hidden"}
    task = Needle(**options, samples_per_place=3, questions_per_context=2)
    samples = task.samples(tokenizer, 300)
    by_context = {sample.context: [] for sample in samples}
    for sample in samples:
        by_context[sample.context].append(sample)
        text = tokenizer.decode(sample.prompt)
        name, number = (
            re.findall(r"number of (\w+)\?", tokenizer.decode(sample.after))[0],
            tokenizer.decode(sample.continuation),
        )
        before = text.partition(f"\nThe magic number of {name} is{number}.\n")[0]
        rest = re.sub(r"\nThe magic number of \w+ is \d+.\n", "", text)
        here = len(re.sub(r"\nThe magic number of \w+ is \d+.\n", "", before)) / len(rest)
        assert before != text and here == pytest.approx(sample.coordinates["depth"], abs=0.08)
    assert len(samples) == 12 and len(by_context) == 6
    for asked in by_context.values():
        assert len({tuple(sample.prompt) for sample in asked}) == 1
        assert {sample.coordinates["depth"] for sample in asked} in ({0, 0.8}, {0.2, 1})
    for wrong, message in ((3, "expected a divisor of the number of depths, 4"), (4, "expected {name} in fact")):
        with pytest.raises(ValueError, match=message):
            Needle(**options, questions_per_context=wrong, fact="\n{number}\n")


@pytest.mark.parametrize("name", TASKS)
def test_a_length_without_room_is_refused(name, tokenizer):  # noqa: F811
    task = TASKS[name][0]
    with pytest.raises(ValueError, match=r"lengths: \d+ tokens leave no room"):
        type(task)(**{**vars(task), "lengths": [150]}).samples(tokenizer, 300)
