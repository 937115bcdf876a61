from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from dmc import Engine, SamplingParams, load_model
from dmc.budget import Budget
from dmc.data import TextSource
from dmc.policies import LocalWindow
from dmc.results.speed import measure_speed
from dmc.results.tasks import Recall, TextLoss


def text_loss(folders: Any, tmp_path: Path, **changes: Any) -> TextLoss:
    options = {"num_samples": 3, "context_tokens": 24, "scored_tokens": 8, "cache_folder": str(tmp_path), **changes}
    return TextLoss(TextSource(str(folders.text)), **options)


def plain_loss(model: Any, prompt: list[int], continuation: list[int]) -> float:
    """Feed everything at once and read the losses of the continuation off the logits."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + continuation]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(continuation)))


def test_windows_of_text_are_spread_and_scored_behind_their_context(folders: Any, tmp_path: Path) -> None:
    model, tokenizer = load_model(folders.stock), AutoTokenizer.from_pretrained(folders.stock)
    task = text_loss(folders, tmp_path)
    samples = task.samples(tokenizer, model.config.vocab_size)
    stream = [*tokenizer(folders.text.read_text())["input_ids"], tokenizer.eos_token_id]
    last = len(stream) // 32 - 1
    expected = [stream[32 * index : 32 * (index + 1)] for index in (0, round(last / 2), last)]
    assert [each.prompt + each.continuation for each in samples] == expected
    assert {len(each.prompt) for each in samples} == {24}
    results = task.evaluate(Engine(model), samples)
    for sample, result in zip(samples, results, strict=True):
        assert result.metrics["loss"] == pytest.approx(plain_loss(model, sample.prompt, sample.continuation), rel=1e-5)
        assert (result.stats.tokens_seen, result.stats.achieved_ratio) == (31, 1.0)


def test_text_needs_a_tokenizer_and_room(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        text_loss(folders, tmp_path).samples(None, 300)
    with pytest.raises(ValueError, match="scored_tokens=0: expected a whole number >= 1"):
        text_loss(folders, tmp_path, scored_tokens=0)
    with pytest.raises(FileNotFoundError, match="absent"):
        TextLoss(TextSource(str(tmp_path / "absent.txt"))).identity()


def test_the_files_of_a_text_belong_to_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one")
    task = TextLoss(TextSource(str(path)))
    before = task.identity()
    assert task.identity() == before
    path.write_text("one and two")
    assert task.identity() != before


@pytest.mark.parametrize("name", ["copy", "needle", "key_value"])
def test_recall_compares_what_is_generated_with_the_answer(name: Any, folders: Any) -> None:
    model = load_model(folders.compressed)
    task = Recall(name, num_samples=3, sequence_length=40, answer_length=2)
    samples = task.samples(None, model.config.vocab_size)
    wholes = [[*sample.prompt, *sample.after] for sample in samples]
    for sample in samples:
        marks = [i for i, token in enumerate(sample.prompt) if token == 1]
        asked = sample.prompt[-1:] if name == "key_value" else []
        places = [i + 1 + len(asked) for i in marks if sample.prompt[i + 1 : i + 1 + len(asked)] == asked]
        assert sample.place["length"] == 40
        assert sample.place["depth"] in [round(place / 38, 1) for place in places]
    engine = Engine(model)
    greedy = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    (generation,) = engine.generate([wholes[1]], greedy)
    samples[1].continuation[:] = generation.token_ids  # one that the model knows
    results = task.evaluate(engine, samples)
    assert [result.metrics["exact_match"] for result in results][1] == 1.0
    assert results[0].metrics["exact_match"] == float(
        engine.generate([wholes[0]], greedy)[0].token_ids == samples[0].continuation
    )
    for whole, sample, result in zip(wholes, samples, results, strict=True):
        assert result.metrics["loss"] == pytest.approx(plain_loss(model, whole, sample.continuation), rel=1e-3)
        assert result.stats.tokens_seen == len(whole) + 1 == (41 if name == "key_value" else 39)
        assert result.stats.achieved_ratio > 1.1


def test_recall_knows_its_limits() -> None:
    with pytest.raises(ValueError, match="sequence_length=4 has no room"):
        Recall("copy", sequence_length=4)
    with pytest.raises(ValueError, match="vocab_size=400, the model knows 300"):
        Recall("copy", sequence_length=40, vocab_size=400).samples(None, 300)


def test_scoring_measures_the_memory_that_generating_takes(folders: Any, make_prompts: Any) -> None:
    engine = Engine(load_model(folders.compressed))
    prompts = make_prompts(30, 21)
    generations = engine.generate(prompts, SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True))
    scorings = engine.score_with_stats(prompts, [each.token_ids for each in generations])
    for scoring, generation, plain in zip(
        scorings, generations, engine.score(prompts, [each.token_ids for each in generations]), strict=True
    ):
        assert torch.equal(scoring.stats.slots, generation.stats.slots)
        assert scoring.stats.bytes_allocated == generation.stats.bytes_allocated
        assert scoring.stats.tokens_seen == generation.stats.tokens_seen
        assert torch.equal(scoring.logprobs, plain)
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 3}, {"max_batch_size": 1}])
def test_speed_counts_all_sequences_and_leaves_nothing_behind(
    options: dict[str, int], folders: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_second(action: Any) -> float:
        action()
        return 1.0

    monkeypatch.setattr("dmc.results.speed.seconds", one_second)
    engine = Engine(load_model(folders.stock), **options)
    speed = measure_speed(engine, make_prompts(10, 14), new_tokens=4)
    steps = {"prefill_chunk_size": 5, "max_batch_size": 2}
    assert speed.prefill == 24 / (steps[next(iter(options))] if options else 1)
    assert speed.decode == (1 if "max_batch_size" in options else 2)
    assert engine.blocks_in_use == 0


@pytest.mark.parametrize("question", ["known", "hidden"])
@pytest.mark.parametrize("kind", ["copy", "needle", "key_value"])
def test_an_answer_of_one_token_comes_from_what_the_cache_has_kept(kind: Any, question: Any, make_stock: Any) -> None:
    task, model = Recall(kind, 24, 40, answer_length=1, question=question), make_stock()
    full, greedy = Engine(model), SamplingParams(max_new_tokens=1, temperature=0.0)
    asked = task.samples(None, 83)
    wholes = [[*sample.prompt, *sample.after] for sample in asked]
    right = [generation.token_ids for generation in full.generate(wholes, greedy)]
    samples = [dataclasses.replace(each, continuation=answer) for each, answer in zip(asked, right, strict=True)]
    assert {result.metrics["exact_match"] for result in task.evaluate(full, samples)} == {1.0}
    forgetful = Engine(model, policy=LocalWindow(budget=Budget(tokens=1)))
    at_once = [generation.token_ids for generation in forgetful.generate(wholes, greedy)]
    assert at_once == right  # the prompt's own pass sees everything: nothing is measured
    results = task.evaluate(forgetful, samples)
    assert sum(result.metrics["exact_match"] for result in results) / 24 < 0.5
    assert all(result.stats.mean_slots.max() <= 2 for result in results)
    assert forgetful.blocks_in_use == full.blocks_in_use == 0
