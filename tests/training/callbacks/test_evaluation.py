import os
import signal
from pathlib import Path
from statistics import fmean

import pytest
import torch
from launching import logged, logged_parts, train_ranks

from dmc import Engine, SamplingParams, load_model
from dmc.config import build_config
from dmc.data import TextSource
from dmc.models.loading import load_tokenizer
from dmc.results.tasks import FactRecall, Needle, Sample
from dmc.runtime.request import of_given_tokens
from dmc.training.callbacks.evaluation import Evaluation, score_answers
from dmc.training.callbacks.preemption import PreemptedError
from dmc.training.config import RunConfig
from dmc.training.run import train

NEEDLE = {
    "lengths": [64, 80],
    "depths": [0.0, 0.5],
    "samples_per_place": 2,
    "fact": "\n{number}.",
    "question_text": "\nNo? It is",
    "digits": 2,
}
RECALL = {"lengths": [48], "keys": 2, "num_keys": 3, "contexts": 3, "questions": 1}


@pytest.mark.parametrize("gates", [None, {}, {"delay": 3}, {"action": "drop", "delay": 4}, {"decisions": "per_layer"}])
def test_answers_are_scored_as_a_cache_decodes_them(gates, make_stock, make_compressed):
    """The question comes after the prompt is compressed; every second answer is made wrong."""
    model = make_stock() if gates is None else make_compressed(gates=gates)
    draw = torch.Generator().manual_seed(0)
    lengths = (40, 23, 40, 31, 40, 23)
    prompts, after = [
        [torch.randint(83, (length,), generator=draw).tolist() for length in lengths_of_one]
        for lengths_of_one in (lengths, [2, 5, 2, 1, 2, 5])
    ]
    engine = Engine(model)
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    right = [generation.token_ids for generation in engine.generate(prompts, params, progress=False, after=after)]
    answers = [[*tokens[:-1], (tokens[-1] + 1) % 83] if number % 2 else tokens for number, tokens in enumerate(right)]
    samples = [
        Sample(prompt, answer, after=asked) for prompt, asked, answer in zip(prompts, after, answers, strict=True)
    ]
    score = score_answers(model, samples, batch_size=2)
    scorings = engine.score_with_stats(prompts, answers, of_given_tokens, after)
    assert score.exact_match == 0.5
    assert score.loss == pytest.approx(
        fmean(-float(scoring.logprobs.double().mean()) for scoring in scorings), abs=1e-4
    )


STDLIB = {"_target_": "dmc.data.StandardLibrarySource"}


@pytest.fixture
def evaluated(run_values):
    source = {"_target_": "dmc.data.TextSource", "name": "of a split for reports, which is not there"}
    tasks = {
        "needle": {"_target_": "dmc.results.tasks.Needle", "haystack": source, **NEEDLE},
        "recall": {"_target_": "dmc.results.tasks.FactRecall", "haystack": source, **RECALL},
    }
    run_values["callbacks"] = {
        "evaluation": {
            "_target_": "dmc.training.callbacks.evaluation.Evaluation",
            "tasks": tasks,
            "every_steps": 4,
            "ratios": [3.0],
        }
    }
    run_values["training"] |= {"calibrate": False}
    return run_values


def test_curves_agree_with_the_exported_model_and_are_not_measured_again(evaluated, monkeypatch):
    plain = Evaluation.after_step

    def stop_at_four(self, trainer, module, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        plain(self, trainer, module, step)

    monkeypatch.setattr(Evaluation, "after_step", stop_at_four)
    config = build_config(RunConfig, evaluated)
    with pytest.raises(PreemptedError):
        train(config)
    run = train(config)
    assert [sorted(part) for part in logged_parts(run.folder, "validation/needle")] == [[4], [5, 8]]
    model, tokenizer = load_model(run.final), load_tokenizer(str(run.final))
    source = TextSource(evaluated["data"]["validation"]["text"]["name"])
    for name, task in (
        ("needle", Needle(haystack=source, **NEEDLE)),
        ("recall", FactRecall(haystack=source, **RECALL)),
    ):
        results = task.evaluate(Engine(model, tokenizer), task.samples(tokenizer, len(tokenizer)))
        loss = fmean(result.metrics["loss"] for result in results)
        assert logged(run.folder, f"validation/{name}_loss")[8] == pytest.approx(loss, abs=1e-4)
        assert logged(run.folder, f"validation/{name}")[8] == fmean(result.metrics["exact_match"] for result in results)


@pytest.mark.parametrize(
    ("strategy", "trainer"),
    [
        ("deepspeed_zero3", {}),
        pytest.param("fsdp2", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("ddp", {"context_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["zero3", "tensors", "contexts"],
)
def test_ranks_divide_the_questions_under_every_strategy(evaluated, corpus, tmp_path, strategy, trainer):
    names = [f"validation/{task}{kind}" for task in ("needle", "recall") for kind in ("", "_loss")]
    evaluated["training"] |= {"batch_size": 6, "micro_batch_size": 3}
    for task in evaluated["callbacks"]["evaluation"]["tasks"].values():
        task["lengths"] = [45, *task["lengths"]]  # which no two ranks divide
    alone = evaluated | {"output_dir": str(corpus / "questions alone")}  # once for all strategies
    expected, folder = train(build_config(RunConfig, alone)).folder, tmp_path / "ranks"
    trainer = evaluated["trainer"] | {"devices": 2, "strategy": strategy} | trainer
    train_ranks(evaluated | {"output_dir": str(folder), "trainer": trainer}, 2, tmp_path / "log")
    for name in names:
        assert logged(folder, name) == pytest.approx(logged(expected, name), abs=1e-5), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": {}}, "tasks"),
        ({"every_steps": 0}, "every_steps=0"),
        (
            {"tasks": {"needle": {"_target_": "dmc.results.tasks.Needle"}}},
            "callbacks.evaluation .*setting haystack is missing",
        ),
        ({"tasks": {"loss": {"_target_": "dmc.results.tasks.TextLoss", "source": STDLIB}}}, "tasks.loss has no right"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_run_is_recorded(evaluated, changes, said):
    evaluated["callbacks"]["evaluation"] |= changes
    with pytest.raises(ValueError, match=said):
        train(build_config(RunConfig, evaluated))
    assert not (Path(evaluated["output_dir"]) / "run.json").exists()
