"""Agreement with the full cache's answers, which its cell gives first."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_rows import CONFIGS
from transformers import AutoTokenizer

from dmc import Engine, SamplingParams, load_model
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import run_cells
from dmc.results.grid import plan_grid
from dmc.results.store import Store
from dmc.results.tables import format_tables
from dmc.results.tasks import Agreement

TASK = {"_target_": "dmc.results.tasks.Agreement", "length": 96, "contexts": 3, "answer_tokens": 12}
TASK |= {"name": "agreement", "haystack": "The grass is green. The sky is blue.\n", "questions": ["Why?", "Say more."]}


def run_grid(config):
    cells, store = plan_grid(config, CONFIGS), Store(Path(config.output) / "cells.jsonl")
    run_cells(cells, store, lambda model: load_with_tokenizer(model.path, "float32", None))
    return {(row["model"], row["policy"], row["budget"]): row for row in store.rows()}, store


def test_a_method_is_measured_by_the_answers_of_the_full_cache(make_config, folders):
    models = {"small": str(folders.compressed), "base": str(folders.stock)}  # whose answers come last
    config = make_config(models=models, tasks=[TASK], policies=["full", "local_window"], budgets=[4, "bytes:small"])
    rows, store = run_grid(config)
    assert {row["status"] for row in rows.values()} == {"done"} and len(rows) == 4
    full = rows["base", "full", None]
    assert (full["metrics"]["agreement"], full["metrics"]["identical"]) == (1.0, 1.0)
    model, tokenizer = load_model(folders.stock), AutoTokenizer.from_pretrained(folders.stock)
    samples = Agreement(**{name: value for name, value in TASK.items() if name not in ("name", "_target_")}).samples(
        tokenizer, 300
    )
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    for sample, answer in zip(samples, full["answers"], strict=True):
        (whole,) = Engine(model, tokenizer).generate([[*sample.prompt, *sample.after]], greedy)
        assert answer == whole.token_ids
    window = rows["base", "local_window", "4"]
    policy = plan_grid(config, CONFIGS)[2].method.build()
    for index, (sample, answer) in enumerate(zip(samples, full["answers"], strict=True)):
        engine = Engine(model, tokenizer, policy)
        (scoring,) = engine.score_with_stats([sample.prompt], [answer], after=[sample.after])
        same = scoring.logprobs.argmax(-1) == torch.tensor(answer)
        assert window["sample_values"][index] == pytest.approx(float(same.float().mean()))
        loss = -scoring.logprobs[range(len(answer)), answer].mean()
        assert window["samples_by_metric"]["loss"][index] == pytest.approx(float(loss), abs=1e-4)
        (mine,) = engine.generate([sample.prompt], greedy, after=[sample.after])
        alike = [one == other for one, other in zip(mine.token_ids, answer, strict=False)]
        first = alike.index(False) if False in alike else len(alike)
        assert window["samples_by_metric"]["identical"][index] == pytest.approx(first / len(answer))
    assert len({row["samples_key"] for row in rows.values()}) == 1  # they are paired
    assert window["metrics"]["agreement"] < 1.0
    assert "agreement" in "".join(format_tables(store.frame()))


def test_without_a_full_cache_nothing_starts(make_config, folders):
    for models, policies, whose in (
        ({"base": str(folders.stock)}, ["local_window"], "base"),
        ({"small": str(folders.compressed)}, ["full"], "None"),
    ):
        with pytest.raises(ValueError, match=f"agreement needs the full cache of {whose}: add full to policies"):
            plan_grid(make_config(models=models, tasks=[TASK], policies=policies, budgets=[4]), CONFIGS)


def test_gates_that_were_scored_on_the_answers_of_another_model_are_not_finished(make_config, folders, tmp_path):
    for name in ("one", "other"):
        shutil.copytree(folders.stock, tmp_path / name)
    models = {name: str(tmp_path / name) for name in ("one", "other")} | {"small": str(folders.compressed)}
    config = make_config(models=models, tasks=[TASK], policies=["full"], budgets=[], reference="one")
    rows, _ = run_grid(config)
    assert len({row["samples_key"] for row in rows.values()}) == 1
    with pytest.raises(ValueError, match=r"has small/.* with answers\.path=.*one, not .*other: give overwrite=true"):
        run_grid(replace(config, reference="other"))
