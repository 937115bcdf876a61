import numpy as np
import pytest
import torch

from dmc.config import build_config
from dmc.data import FactSequences, FactWriter, TextSource, build_packed, train_tokenizer
from dmc.data.config import FactsConfig
from dmc.data.facts import SEEN_FORMS, UNSEEN_FORMS, weave

LESSONS = [
    {"kind": "copies", "length": 16, "sequences": 2},
    {"kind": "pairs", "length": 32, "sequences": 1, "keys": 3, "of_keys": 3},
    {"kind": "pairs", "length": 32, "sequences": 2, "keys": 3},
    {"kind": "facts", "length": 64, "sequences": 2, "keys": 2},
]
LENGTH = 128


@pytest.fixture(scope="module")
def wordy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordy")
    words = ["house", "garden", "river", "mountain", "window", "letter", "number", "colour", "paper", "stone"]
    draw = np.random.default_rng(0)
    text = " ".join(draw.choice(words, 3000)) + "".join(SEEN_FORMS)
    (folder / "book.txt").write_text(" ".join(map(str, range(4000))))  # without a word that may be a key
    return folder, train_tokenizer([text] * 3, 340, folder / "tokenizer")


def sequences(wordy, has_lessons=True, seed=(0, 0), has_questions=True, **settings):
    folder, tokenizer = wordy
    values = {"keys": 4, "num_keys": 5, "lessons": LESSONS} | settings
    packed = build_packed(TextSource(str(folder / "book.txt")), tokenizer, LENGTH, folder / "cache")
    options = {"keys": seed, "has_lessons": has_lessons, "has_questions": has_questions}
    return FactSequences(packed, tokenizer, build_config(FactsConfig, values), LENGTH, **options)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_woven_into_a_text_leaves_the_text_in_order(seed):
    draw = np.random.default_rng(seed)
    inserts = [[-1 - number] * int(draw.integers(1, 5)) for number in range(int(draw.integers(0, 8)))]
    text, length = list(range(60)), 50
    tokens, begins = weave(inserts, text, length, draw)
    assert (
        len(tokens) == length and [token for token in tokens if token >= 0] == text[: length - sum(map(len, inserts))]
    )
    assert [tokens[begin : begin + len(insert)] for begin, insert in zip(begins, inserts, strict=True)] == inserts
    with pytest.raises(ValueError, match="leave -1 of 5 tokens"):
        weave([[-1] * 6], text, 5, draw)


def test_facts_are_spread_evenly_over_a_text():
    draw, begins = np.random.default_rng(0), []
    for _ in range(200):
        begins += weave([[-1]] * 10, [0] * 90, 100, draw)[1]
    assert np.histogram(begins, bins=4, range=(0, 100))[0] / len(begins) == pytest.approx([0.25] * 4, abs=0.03)


def test_lessons_come_one_after_the_other_and_then_whole_sequences(wordy):
    dataset = sequences(wordy)
    shapes = [tuple(dataset[position]["input_ids"].shape) for position in range(9)]
    assert shapes == [*[(8, 16)] * 2, *[(4, 32)] * 3, *[(2, 64)] * 2, *[(128,)] * 2]
    assert dataset[5]["position"] == 5
    assert {tuple(sequences(wordy, has_lessons=False)[place]["input_ids"].shape) for place in range(9)} == {(128,)}
    with pytest.raises(ValueError, match="length=48 does not divide the 128 tokens"):
        sequences(wordy, lessons=[{"kind": "copies", "length": 48, "sequences": 1}])


def test_an_item_is_a_function_of_seed_and_position(wordy):
    first, again = sequences(wordy), sequences(wordy)
    others = sequences(wordy, seed=(1, 0)), sequences(wordy, seed=(0, 1))
    for position in (7, 0, 3, 5):
        item = first[position]
        assert all(torch.equal(item[name], again[position][name]) for name in ("input_ids", "loss_mask"))
        assert not any(torch.equal(item["input_ids"], other[position]["input_ids"]) for other in others)


def test_copies_come_twice_and_pairs_again(wordy):
    dataset = sequences(wordy, random_forms=0.0)
    copies = dataset[0]
    assert torch.equal(copies["input_ids"][:, :8], copies["input_ids"][:, 8:])
    assert copies["loss_mask"].unique(dim=0).tolist() == [[0.0] * 8 + [1.0] * 8]
    for position in (2, 3, 4):
        pairs = dataset[position]
        for tokens, weights in zip(pairs["input_ids"].tolist(), pairs["loss_mask"].tolist(), strict=True):
            values = dict(zip(tokens[:6:2], tokens[1:6:2], strict=True))
            assert len(values) == 3 and set(values) <= set(dataset.writer.keys[: 3 if position == 2 else 5])
            assert [values[key] for key in tokens[::2]] == tokens[1::2]
            assert weights == [0.0] * 6 + [0.0, 1.0] * 13


OPTIONS = [{}, {"rebinding": 1.0}, {"random_forms": 1.0}, {"asked_twice": 1.0}, {"key_words": 2, "rebinding": 1.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_question_has_the_newest_value_of_its_key(wordy, options):
    dataset = sequences(wordy, **({"rebinding": 0.0, "random_forms": 0.0} | options))
    asking, values, asked = dataset.writer.question(()), {*dataset.writer.values}, 0
    words = options.get("key_words", 1)
    for position in range(7, 40):
        item = dataset[position]
        tokens, weights = item["input_ids"].tolist(), item["loss_mask"].tolist()
        assert set(weights) == {1.0, 9.0}
        for place in [place for place, weight in enumerate(weights) if weight == 9]:
            begin = place - words - len(asking)
            key = tokens[place - words : place]
            assert tokens[begin : place - words] == asking and {*key} <= {*dataset.writer.keys}
            assert tokens[place] in values
            ends = range(words, begin + 1)
            places = [at - 1 for at in ends if tokens[at - words : at] == key and {*tokens[at : at + 3]} & values]
            asked += 1
            if "random_forms" not in options:  # whose random tokens may be words
                assert next(token for token in tokens[places[-1] + 1 :] if token in values) == tokens[place]
    assert asked > 100


def test_halves_of_the_words_are_apart_and_a_run_says_no_word_of_the_other(wordy):
    writers = {words: FactWriter(wordy[1], 5, words) for words in ("all", "first_half", "second_half")}
    for kind in ("keys", "values"):
        every, first, second = ({*getattr(writer, kind)} for writer in writers.values())
        assert len(first) == len(second) == 2 and not first & second and first | second < every
    other = {*writers["second_half"].keys, *writers["second_half"].values}
    half = {"words": "first_half", "lessons": []}
    plain, facts = (sequences(wordy, has_lessons=False, keys=keys, **half) for keys in (1, 2))
    texts = [{*dataset[position]["input_ids"].tolist()} for dataset in (plain, facts) for position in range(20)]
    assert all({*writers["first_half"].keys} & text for text in texts)
    in_text = {*np.concatenate([sequence["input_ids"] for sequence in facts.text.dataset]).tolist()}
    assert not (other - in_text) & set().union(*texts)
    with pytest.raises(ValueError, match="words='both': expected one of all, first_half, second_half"):
        FactWriter(wordy[1], 5, "both")


@pytest.mark.parametrize(
    ("keys", "num_keys", "words", "available"),
    [(6, 5, "all", 5), (3, 5, "first_half", 2), (3, 5, "second_half", 2), (1, 1, "first_half", 0)],
)
def test_more_keys_than_there_are_words_for_are_refused(keys, num_keys, words, available):
    with pytest.raises(ValueError, match=f"data.facts.keys={keys}: expected at most {available}, .*words={words}"):
        FactsConfig(keys=keys, num_keys=num_keys, words=words)


@pytest.mark.parametrize(
    ("lesson", "words", "message"),
    [
        ({"keys": 6}, "all", r"lessons\[1\]\.keys=6: expected at most 5"),
        ({"keys": 3}, "first_half", r"lessons\[1\]\.keys=3: expected at most 2"),
        ({"keys": 3, "of_keys": 2}, "all", r"lessons\[1\]\.keys=3: expected at most 2"),
        ({"keys": 2, "of_keys": 3}, "second_half", r"lessons\[1\]\.of_keys=3: expected at most 2"),
    ],
)
def test_a_lesson_of_more_keys_than_it_draws_from_is_refused(lesson, words, message):
    lessons = [{"kind": "copies", "length": 16, "sequences": 1, "keys": 9}, {"kind": "pairs", "length": 32} | lesson]
    lessons[1]["sequences"] = 1
    with pytest.raises(ValueError, match=message):
        build_config(FactsConfig, {"keys": 1, "num_keys": 5, "words": words, "lessons": lessons})


def test_a_text_that_is_compressed_before_anyone_asks_says_each_fact_once_and_evenly(wordy):
    dataset = sequences(wordy, rebinding=1.0, has_lessons=False, has_questions=False)
    places = []
    for position in range(60):
        tokens, weights = dataset[position]["input_ids"].tolist(), dataset[position]["loss_mask"]
        said = [place for place, token in enumerate(tokens) if token in dataset.writer.keys]
        assert len({tokens[place] for place in said}) == len(said) == 4 and weights.tolist() == [1.0] * LENGTH
        assert all({*tokens[place + 1 : place + 4]} & {*dataset.writer.values} for place in said)
        places += said
    assert np.histogram(places, bins=2, range=(0, LENGTH))[0] / len(places) == pytest.approx([0.5] * 2, abs=0.07)


def test_keys_of_several_words_are_distinct_and_share_few_words(wordy):
    writer, draw = FactWriter(wordy[1], 5, key_words=2), np.random.default_rng(0)
    drawn = [writer.draw_keys(9, draw, of_keys=3) for _ in range(20)]
    words = [{word for key in keys for word in key} for keys in drawn]
    pairs = [{(one, other) for one in chosen for other in chosen} for chosen in words]
    assert [{*keys} for keys in drawn] == pairs
    assert {len(chosen) for chosen in words} == {3} and set.union(*words) == {*writer.keys}
    every = writer.draw_keys(25, draw)
    assert len({*every}) == 25 and {word for key in every for word in key} == {*writer.keys}


def test_unseen_forms_differ_and_too_few_words_are_refused(wordy):
    _, tokenizer = wordy
    writer, draw = FactWriter(tokenizer, 5), np.random.default_rng(0)
    key, value = writer.keys[0], writer.values[0]
    for unseen, forms in ((False, SEEN_FORMS), (True, UNSEEN_FORMS)):
        said = {tokenizer.decode(writer.fact((key,), value, draw, unseen=unseen)) for _ in range(200)}
        words = {"key": tokenizer.decode([key]), "value": tokenizer.decode([value])}
        assert said == {form.format(**words) for form in forms}
    assert not {*SEEN_FORMS} & {*UNSEEN_FORMS} and not {*writer.keys} & {*writer.values}
    few = len(FactWriter(tokenizer, 99).keys)
    assert len(FactWriter(tokenizer, 99).values) == few < 99 and FactWriter(tokenizer, few, keys=few)
    message = rf"keys=99: expected at most {few}; the tokenizer has {2 * few} words of one token"
    with pytest.raises(ValueError, match=message):
        FactWriter(tokenizer, 99, keys=99)
