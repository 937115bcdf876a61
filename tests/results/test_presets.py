"""The presets of compare.py: lm-eval's own tasks over local data of the same schema, from one command to the table."""

import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval")

import lm_eval.tasks
from omegaconf import OmegaConf
from scripts_here import run_script
from transformers import AutoTokenizer

from dmc.results.lm_eval_tasks import read_benchmarks
from dmc.results.store import Store

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LM_EVAL = Path(lm_eval.tasks.__file__).parent
PRESETS = {"ruler_4k": "ruler", "longbench": "longbench", "reasoning": "minerva_math aime gsm8k"}
"""Where lm-eval keeps their tasks."""
DOCUMENT = {
    **{"input": "alpha beta", "outputs": ["gamma"], "max_length": 4096, "gen_prefix": "The answer is", "length": 9},
    **{"context": "alpha beta", "question": "beta?", "answers": ["Paragraph 1"], "all_classes": ["gamma", "delta"]},
    **{"problem": "1 + 1?", "solution": "It is $\\boxed{2}$.", "answer": "#### 2"},
}
"""A document with the fields of all of these data sets; AIME's of 2024 begin with capitals."""
AIME24 = {"Problem": "1 + 1?", "Answer": 2}


@pytest.fixture
def without_further_packages(monkeypatch, offline_lm_eval):
    """As much of what the tasks' scores are made with as it takes to load them."""
    fuzz = SimpleNamespace(ratio=lambda one, other: 100.0 * (one == other))
    rouge = SimpleNamespace(get_scores=lambda *_, **__: {"rouge-l": {"f": 0.5}})
    words = {kind: ["alpha"] for word in ("noun", "adjective", "verb") for kind in (word, f"{word}s")}
    modules = {
        "jieba": SimpleNamespace(cut=lambda text, **_: text.split()),
        "fuzzywuzzy": SimpleNamespace(fuzz=fuzz),
        "rouge": SimpleNamespace(Rouge=lambda: rouge),
        "wonderwords": SimpleNamespace(RandomWord=lambda: SimpleNamespace(_categories=words)),
        "nltk": SimpleNamespace(sent_tokenize=str.split, data=SimpleNamespace(find=str)),
        "math_verify": SimpleNamespace(parse=str, verify=lambda gold, target: gold == target),
    }
    version = importlib.metadata.version
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.11" if "antlr4" in name else version(name))


def local_tasks(names, folders, target):
    """Write lm-eval's tasks once more, over documents in a file; all else is theirs."""
    files = {
        name: path
        for folder in folders
        for path in (LM_EVAL / folder).glob("*.yaml")
        for name in [line[6:].strip() for line in path.read_text().splitlines() if line.startswith("task: ")]
    }
    for name in names:
        document = AIME24 if name == "aime24" else DOCUMENT
        (target / f"{name}.jsonl").write_text(f"{json.dumps(document)}\n" * 3)
        where = {"data_files": dict.fromkeys(("train", "test"), str(target / f"{name}.jsonl"))}
        local = {"dataset_path": "json", "dataset_name": None, "custom_dataset": None, "dataset_kwargs": where}
        OmegaConf.save({"include": str(files[name]), "task": name, **local}, target / f"{name}.yaml")


SLOW = ("ruler_4k", "longbench")


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PRESETS]
)
def test_a_preset_runs_from_one_short_command_to_the_table(
    preset, folders, tmp_path, monkeypatch, capsys, without_further_packages
):
    settings = OmegaConf.load(CONFIGS / "experiment" / f"{preset}.yaml")
    benchmarks = read_benchmarks(settings.tasks, CONFIGS / "evaluation")
    names = [task for benchmark in benchmarks for task in benchmark.tasks]
    (tmp_path / "tasks").mkdir()
    local_tasks(names, PRESETS[preset].split(), tmp_path / "tasks")
    model = tmp_path / "model"
    model.mkdir()
    for file in folders.stock.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    monkeypatch.chdir(tmp_path)
    command = ["compare.py", f"experiment={preset}", f"models={{base: {model}}}", "policies=[h2o]", "budgets=[4]"]
    short = [f"lm_eval.tasks_folder={tmp_path / 'tasks'}", "lm_eval.limit=2", "lm_eval.max_gen_toks=4"]
    assert run_script(*command, *short) == ""
    rows = Store(tmp_path / settings.output / "cells.jsonl").rows()
    assert [(row["task"], row["status"], row["samples"]) for row in rows] == [(name, "done", 2) for name in names]
    assert all(row["settings"]["lm_eval"]["max_gen_toks"] == 4 for row in rows)
    printed = capsys.readouterr().out
    for benchmark in benchmarks:
        assert benchmark.name in printed
