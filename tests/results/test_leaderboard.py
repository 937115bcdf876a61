"""Folders for kvpress's leaderboard: what kvpress 0.5.5 writes and reads, from one command to the files."""

import ast
import json
from pathlib import Path

import pandas
import pytest
import yaml
from scripts_here import run_script
from transformers import AutoTokenizer

from dmc.results.leaderboard import write_leaderboard
from dmc.results.long_context.ruler import string_match
from dmc.results.store import Store

TASKS = [
    *(f"niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")),
    *("niah_multiquery", "niah_multivalue", "vt", "cwe", "fwe", "qa_1", "qa_2"),
]
CONFIG = """
dataset data_dir model device press_name compression_ratio key_channel_compression_ratio fraction max_new_tokens
max_context_length query_aware needle_depth compression_interval target_size hidden_states_buffer_size output_dir
log_level model_kwargs trust_remote_code press_init_command seed fp8
"""
"""Fields of `config.yaml` of kvpress 0.5.5, where a press has neither threshold nor ratio of heads."""
COLUMNS = {"question", "answer_prefix", "answer", "task", "max_new_tokens", "predicted_answer", "compression_ratio"}


def naive_metrics(predictions):
    """Score as the leaderboard does: of qa's answers one is enough, of others the share counts; percent per task."""
    found = {}
    for task in sorted(set(predictions["task"])):
        scores = []
        for line in predictions[predictions["task"] == task].itertuples():
            text = "".join(letter for letter in str(line.predicted_answer).strip() if ord(letter) >= 32).lower()
            hits = [answer.lower() in text for answer in ast.literal_eval(line.answer)]
            scores.append(max(hits) if task[:2] == "qa" else sum(hits) / len(hits))
        found[task] = {"string_match": round(sum(scores) / len(scores) * 100, 2)}
    return found


@pytest.fixture
def data(tmp_path):
    """The data set as it lies on the hub: a folder of parquet for each length."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    rows = [
        {
            "context": " ".join(words[(number + step) % 5] for step in range(40)) + f" {number}.\n",
            "question": f"What is the word of {task}? ",
            "answer_prefix": "Answer: the word is",
            "answer": ["a", words[number]],
            "task": task,
            "max_new_tokens": 32,
        }
        for task in TASKS
        for number in range(1)
    ]
    (tmp_path / "ruler" / "4096").mkdir(parents=True)
    pandas.DataFrame(rows).to_parquet(tmp_path / "ruler" / "4096" / "test-00000-of-00001.parquet")
    return tmp_path / "ruler"


@pytest.fixture
def models(folders, tmp_path):
    """The stock model and its retrofit, with a chat template."""
    found = {}
    for name, folder in {"base": folders.stock, "cr2": folders.compressed}.items():
        found[name] = tmp_path / name
        found[name].mkdir()
        for file in folder.iterdir():
            (found[name] / file.name).write_bytes(file.read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = "{% for message in messages %}<{{ message.content }}{% endfor %}"
        tokenizer.save_pretrained(found[name])
    return found


@pytest.mark.usefixtures("offline_lm_eval")
def test_a_folder_holds_what_kvpress_writes_and_reads(models, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["compare.py", "experiment=leaderboard", f"models={{base: {models['base']}, cr2: {models['cr2']}}}"]
    command += ["policies=[full,h2o]", "budgets=[1.333333333333,8]", f"lm_eval.task_settings.ruler={data}"]
    assert run_script(*command, "lm_eval.question=both", "lm_eval.max_gen_toks=6") == ""
    report = ["report.py", "folders=[outputs/leaderboard]", "leaderboard=outputs/kvpress"]
    assert run_script(*report) == ""
    rows = Store(Path("outputs/leaderboard/cells.jsonl")).rows()
    learned = next(row for row in rows if row["learned"])
    removed = 1 - 1 / learned["achieved_ratio"]
    removed = 0.5 if abs(removed - 0.5) <= 0.05 else removed
    model = str(models["base"]).replace("/", "--")
    names = [f"ruler__4096__{model}__{press}" for press in ("no_press__0.00", "h2o__0.25", "h2o__0.88")]
    names.append(f"ruler__4096__{model}__cr2__{removed:.2f}")
    found = sorted(path.name for path in Path("outputs/kvpress").iterdir())
    assert found == sorted(name + end for name in names for end in ("", "__query_aware"))
    for folder in Path("outputs/kvpress").iterdir():
        assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.json", "predictions.csv"]
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert [*config] == CONFIG.split()
        parts = [config[name] for name in ("dataset", "data_dir", "model", "press_name")]
        aware = ["query_aware"] if config["query_aware"] else []
        ratio = f"{config['compression_ratio']:.2f}"
        assert folder.name == "__".join([*(part.replace("/", "--") for part in parts), ratio, *aware])
        predictions = pandas.read_csv(folder / "predictions.csv", keep_default_na=False)
        assert {*predictions.columns} == COLUMNS and len(predictions) == 13
        assert bool((predictions["question"] == "").all()) == config["query_aware"]
        assert predictions["compression_ratio"].sub(config["compression_ratio"]).abs().max() <= 0.05
        metrics = json.loads((folder / "metrics.json").read_text())
        assert [*metrics] == sorted(TASKS) and metrics == naive_metrics(predictions)
    assert any(row["metrics"]["string_match"] > 0 for row in rows)
    for row in rows:  # the table's score is the leaderboard's: the mean over tasks
        assert len(row["sample_values"]) == 13


def test_of_alternative_answers_one_is_enough_and_of_others_the_share_counts():
    assert string_match("qa_1", " It is\n Paris.", ["paris", "Lutetia"]) == 1.0
    assert string_match("niah_multivalue", "12 and\x0034", ["12", "34", "56", "78"]) == 0.5
    assert string_match("vt", "", ["X"]) == 0.0


def test_a_row_without_samples_is_refused_before_anything_is_written(tmp_path):
    row = {"key": "base/full/kvpress_ruler/seed0", "status": "done", "method": "base, full", "model": "base"}
    row |= {"policy": "full", "task": "kvpress_ruler", "benchmark": "kvpress_ruler", "budget": None, "learned": False}
    row |= {"metrics": {}, "main_metric": None, "achieved_ratio": 1, "requested_ratio": 1}
    Store(tmp_path / "cells.jsonl").append(row | {"bytes_allocated_per_token": 1, "settings": {}, "question": "known"})
    with pytest.raises(
        ValueError, match=r"no samples: measure it again with lm_eval\.save_samples=true overwrite=true"
    ):
        write_leaderboard([tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match=r"run dmc compare experiment=leaderboard first"):
        write_leaderboard([], tmp_path / "out")
    assert not (tmp_path / "out").exists()
