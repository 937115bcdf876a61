"""What caches keep of a text, in a terminal: shares of heads by token, and answers from forks of what is left."""

import numpy as np
import pytest
import torch

from dmc import Engine
from dmc.budget import Budget
from dmc.commands.demo import (
    DemoConfig,
    Witness,
    demo,
    interview,
    legend,
    numbers_and_questions,
    page,
    text_and_questions,
    witnesses,
)
from dmc.data import train_tokenizer
from dmc.policies import H2O
from dmc.results.tasks import Sample

WORDS = ["house", "garden", "river", "mountain", "window", "letter", "number", "color", "paper", "stone"]
GATES = {"action": "drop", "delay": 4}


@pytest.fixture
def tokenizer(tmp_path):
    text = " ".join(np.random.default_rng(0).choice(WORDS, 3000))
    return train_tokenizer([text] * 3, 340, tmp_path / "words")


@pytest.fixture
def samples(tokenizer):
    return text_and_questions("a stone by the river. " * 40, tokenizer, 120, 3, 2, num_keys=4)


def test_models_are_kept_in_no_folder_that_holds_others(tmp_path):
    (tmp_path / "retrofit").mkdir()
    (tmp_path / "retrofit" / "config.json").write_text("of a model")
    with pytest.raises(FileExistsError, match="retrofit is not empty: give another output"):
        demo(DemoConfig(save=str(tmp_path)))
    assert [path.name for path in tmp_path.rglob("*")] == ["retrofit", "config.json"]


def test_full_caches_hold_all_and_answer_as_one_pass_does(make_stock, tokenizer, samples):
    model = make_stock(vocab_size=len(tokenizer))
    witness = interview("full", Engine(model, tokenizer), samples)
    assert witness.ratio == 1 and bool((witness.held == 1).all()) and len(witness.held) == len(samples[0].prompt)
    with torch.no_grad():
        asked = [model(torch.tensor([sample.prompt + sample.after])).logits[0, -1].argmax() for sample in samples]
    assert witness.answers == [[int(token)] for token in asked]


def test_shares_add_up_to_the_entries_that_the_engine_counts(make_stock, make_compressed, tokenizer, samples):
    stock, learned = make_stock(vocab_size=len(tokenizer)), make_compressed(vocab_size=len(tokenizer), gates=GATES)
    for engine in (Engine(stock, tokenizer, H2O(budget=Budget(ratio=4))), Engine(learned, tokenizer)):
        with engine.session() as session:
            slots = torch.as_tensor(session.feed(samples[0].prompt).slots)
        witness = interview("it", engine, samples)
        assert 0 < witness.held.mean() < 1
        assert float(witness.held.sum()) * slots.numel() == pytest.approx(float(slots.sum()))


def test_training_free_methods_hold_no_more_than_the_learned_cache(make_stock, make_compressed, tokenizer, samples):
    stock, learned = make_stock(vocab_size=len(tokenizer)), make_compressed(vocab_size=len(tokenizer), gates=GATES)
    found = list(witnesses(stock, learned, tokenizer, samples))
    assert [witness.name for witness in found] == ["full cache", "learned", "H2O", "SnapKV"]
    assert all(witness.ratio == pytest.approx(found[1].ratio, rel=0.05) for witness in found[2:])


def test_a_page_shows_what_is_held_and_what_was_answered(tokenizer):
    right, wrong, text = (tokenizer.encode(word)[:2] for word in (" river", " stone", " house garden"))
    sample = Sample(text, right[:1], after=text[:1])
    both = [Witness("some method", torch.tensor([0.6, 0.1]), 4.0, 1234.5, [tokens[:1]]) for tokens in (right, wrong)]
    pieces, said = [tokenizer.decode([token]) for token in text], tokenizer.decode(right[:1]).strip()
    shown = "\n".join(page(both, [sample], tokenizer, colors=False))
    first, second = shown.split("\nsome method: CR 4.0, ")[1:]
    dots = " " * pieces[1].count(" ") + "·" * len(pieces[1].strip())
    assert first.startswith(f"1,234 bytes a token, 1 of 1 answered\n\n{pieces[0]}{dots}\n")
    assert first.rstrip().endswith("right") and f"wrong, it is {said}" in second and "0 of 1 answered" in second
    colored = "\n".join(page(both[:1], [sample], tokenizer, colors=True))
    assert f"\x1b[48;5;40m{pieces[0]}\x1b[0m" in colored and f"\x1b[48;5;28m{pieces[1]}\x1b[0m" in colored
    assert "dot" in legend(colors=False) and "\x1b[48;5;236m" in legend(colors=True)


def test_numbers_are_spread_over_the_text_and_fit_the_length(tokenizer):
    samples = numbers_and_questions("a stone by the river. ", tokenizer, 400, 4, 3)
    prompt = tokenizer.decode(samples[0].prompt)
    assert len(samples) == 3 and all(sample.prompt == samples[0].prompt for sample in samples)
    assert 390 <= max(len(sample.prompt + sample.after) for sample in samples) <= 400
    for sample in samples:
        name = tokenizer.decode(sample.after).split("?")[0].split()[-1]
        assert f"The magic number of {name} is{tokenizer.decode(sample.continuation)}." in prompt
    places = [prompt.index("The magic", place) for place in range(0, len(prompt), len(prompt) // 4)]
    assert len({*places}) >= 3


def test_numbers_without_room_or_towns_are_refused(tokenizer):
    with pytest.raises(ValueError, match="leaves no room for 4 facts"):
        numbers_and_questions("a stone", tokenizer, 40, 4, 3)
    with pytest.raises(ValueError, match="questions <= keys <= 12"):
        numbers_and_questions("a stone", tokenizer, 400, 13, 3)


def test_a_model_is_gates_alone_beside_their_base(tmp_path):
    with pytest.raises(ValueError, match="is no folder of gates alone"):
        demo(DemoConfig(model=str(tmp_path)))
