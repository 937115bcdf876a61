"""Several instructions in one prompt: scripts that obey some of them, and what caches hold of each."""

import re
from statistics import fmean

import pytest
import torch
from results.test_tasks import FILLER, ScriptedEngine
from transformers import AutoTokenizer

from dmc import Engine, load_model
from dmc.budget import Budget
from dmc.data import train_tokenizer
from dmc.policies import H2O, LocalWindow, Quest, SnapKV
from dmc.results.tasks import Instructions, SystemPrompt, by_coordinates
from dmc.results.tasks.cache_analysis import decisions_of

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = Instructions(haystack=FILLER, length=400, instructions=3, rules=1, contexts=2, max_new_tokens=24)
FACTS = Instructions(haystack="12 34.\n", length=120, form="facts", instructions=3, rules=1, contexts=2, num_keys=4)
CODES = SystemPrompt(haystack=FILLER, length=400, codes=2, contexts=2, max_new_tokens=8)


@pytest.fixture(scope="module")
def model(folders):
    return load_model(folders.stock)


@pytest.fixture
def tokenizer(folders):
    return AutoTokenizer.from_pretrained(folders.stock)


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory):
    text = " alpha beta gamma delta house garden river window" * 20
    return train_tokenizer([text] * 3, 294, tmp_path_factory.mktemp("words"))


def answer_of(text):
    name = re.findall(r'Someone says: "(.*?)"', text)[-1]
    return re.search(rf'says "{name}", answer only "(\w+)"', text)[1]


def value_of(text):
    key = re.split(r"\nget", text)[-1].strip()
    return " " + re.search(rf"\b{key}(?: =| is|:| ->| in| to|\.)? ([a-z]+)", text)[1]


def code_of(text):
    name = re.findall(r"What is the code of (\w+)\?", text)[-1]
    return re.search(rf"code of {name} is (\w+)\. (\w+)", text).groups()


def metrics(task, script, model, tokenizer, **options):
    results = task.evaluate(ScriptedEngine(model, tokenizer, script, **options), task.samples(tokenizer, 300))
    return {name: fmean(result.metrics[name] for result in results) for name in results[0].metrics}


@pytest.mark.parametrize("has_template", [False, True])
def test_each_of_first_middle_and_last_is_obeyed_or_not(model, tokenizer, has_template):
    tokenizer.chat_template = TEMPLATE if has_template else None
    samples = WORDS.samples(tokenizer, 300)
    assert samples == WORDS.samples(tokenizer, 300)
    for sample in samples:
        text = tokenizer.decode(sample.prompt)
        assert len(sample.prompt) == 400 and text.startswith("<user>") == has_template
        pieces = [tokenizer.decode(sample.prompt[begin:end]) for begin, end in sample.spans]
        assert [re.findall(r"Instruction (\d):", piece) for piece in pieces] == [["1"], ["2"], ["3"]]
        assert all(piece in text for piece in pieces) and sample.spans[-1][1] == 400
        assert tokenizer.decode(sample.orders[0].said).endswith("<assistant>") == has_template
    every = {"obeyed": 1, "first": 1, "middle": 1, "last": 1}
    assert metrics(WORDS, answer_of, model, tokenizer) == every
    lazy = metrics(
        WORDS, lambda text: answer_of(text) if re.findall(r'says: "\w+ 3"', text) else "red", model, tokenizer
    )
    assert lazy["last"] == 1 and lazy["obeyed"] == pytest.approx(
        fmean(lazy[name] for name in ("first", "middle", "last"))
    )
    assert metrics(WORDS, lambda text: f"{answer_of(text)} or silver or gold", model, tokenizer)["obeyed"] < 0.5


def test_facts_are_instructions_to_models_that_know_no_sentences(model, word_tokenizer):
    assert metrics(FACTS, value_of, model, word_tokenizer)["obeyed"] == 1
    assert metrics(FACTS, lambda _: " the", model, word_tokenizer)["obeyed"] == 0
    assert all(len(sample.orders) == 3 for sample in FACTS.samples(word_tokenizer, 300))


def share_by_place(task, engine, tokenizer):
    (table,) = (by_coordinates(task.evaluate(engine, task.samples(tokenizer, 300))[:1]) or {None: None}).values()
    return table and torch.tensor(table["share_held"])


def test_survival_is_the_share_of_each_instructions_tokens_that_every_head_holds(folders, model, word_tokenizer):
    sample, budget = FACTS.samples(word_tokenizer, 300)[0], Budget(ratio=4)
    for policy in (None, LocalWindow(budget=budget), H2O(budget=budget)):
        engine = Engine(model, word_tokenizer, policy)
        with engine.session() as session:
            session.feed(sample.prompt)
            held = [[range(120)] * 2] * 2 if policy is None else session.positions_held()
        wanted = [
            [[sum(begin <= int(p) < end for p in head) / (end - begin) for head in layer] for layer in held]
            for begin, end in sample.spans
        ]
        shares = share_by_place(FACTS, engine, word_tokenizer)
        torch.testing.assert_close(shares, torch.tensor(wanted))
        assert (shares == 1).all() == (policy is None) and engine.blocks_in_use == 0
    assert (share_by_place(FACTS, Engine(model, word_tokenizer, Quest(budget=budget)), word_tokenizer) == 1).all()
    gates = load_model(folders.compressed)
    decisions = decisions_of(gates, sample.prompt)
    shares = share_by_place(FACTS, Engine(gates, word_tokenizer), word_tokenizer)
    wanted = [(~decisions[..., begin:end]).float().mean(-1) for begin, end in sample.spans]
    assert torch.equal(shares, torch.stack(wanted)) and 0 < shares.mean() < 1
    assert share_by_place(FACTS, Engine(gates, word_tokenizer, SnapKV(budget=budget)), word_tokenizer) is None


def test_what_a_system_prompt_forbids_is_withheld_and_the_rest_is_told(model, tokenizer):
    tokenizer.chat_template = TEMPLATE
    obedient = metrics(CODES, lambda text: "no" if code_of(text)[1] == "Never" else code_of(text)[0], model, tokenizer)
    assert obedient == {"obeyed": 1, "told": 1, "withheld": 1}
    assert metrics(CODES, lambda text: code_of(text)[0], model, tokenizer) == {"obeyed": 0.5, "told": 1, "withheld": 0}
    assert metrics(CODES, lambda text: "no", model, tokenizer) == {"obeyed": 0.5, "told": 0, "withheld": 1}
    (sample, _) = CODES.samples(tokenizer, 300)
    assert tokenizer.decode(sample.prompt).startswith("<system>")
    assert tokenizer.decode(sample.orders[0].said).startswith("\n<user>What is the code of")


def test_a_system_prompt_needs_a_template_that_takes_one(tokenizer):
    with pytest.raises(ValueError, match="chat template"):
        CODES.samples(tokenizer, 300)
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ValueError, match="takes no conversation of system, user: no system"):
        CODES.samples(tokenizer, 300)


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"instructions": 2}, "instructions"), ({"rules": 99}, "rules"), ({"form": "facts", "rules": 12}, "num_keys=57")],
)
def test_instructions_out_of_range_are_refused(changes, error):
    with pytest.raises(ValueError, match=error):
        Instructions(haystack=FILLER, **changes)


def test_instructions_need_room(tokenizer):
    with pytest.raises(ValueError, match="length=40: 5 instructions leave"):
        Instructions(haystack=FILLER, length=40).samples(tokenizer, 300)
