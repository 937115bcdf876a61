"""lm-eval's tasks as tasks of a grid: what a row keeps, and what is refused."""

import itertools
import json
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval")

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from report_rows import CONFIGS, NEEDLE, run_grid
from scripts_here import run_script

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.models.loading import load_with_tokenizer
from dmc.policies import H2O
from dmc.results.estimates import estimate
from dmc.results.grid import plan_grid
from dmc.results.lm_eval_tasks import (
    CODE_CONSENT,
    LONG_CONTEXT,
    Benchmark,
    LMEvalSettings,
    check_tasks,
    over_seeds,
    read_benchmarks,
)
from dmc.results.statistics import summarize
from dmc.results.store import Store
from dmc.results.tables import write_tables

BOTH = {"name": "both", "members": ["local_choice", "local_generation"], "metric": ["acc", "exact_match"]}
pytestmark = pytest.mark.usefixtures("offline_lm_eval")


@pytest.fixture
def make_lm_eval(make_config, tasks_folder):
    """Return a builder of a grid over the local tasks; settings of lm-eval's tasks are told apart by their names."""

    def build(**changes):
        given = {name: changes.pop(name) for name in LMEvalSettings.__dataclass_fields__ if name in changes}
        lm_eval = {"tasks_folder": str(tasks_folder), "limit": 3} | given
        return make_config(**{"tasks": [BOTH], "lm_eval": lm_eval} | changes)

    return build


H2O_2 = {"policies": ["h2o"], "budgets": [2]}


def run(config):
    return run_grid(config).rows()


def samples_of(config, row):
    (file,) = (Path(config.output) / "samples" / row["key"].replace("/", "__")).iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_row_tells_quality_memory_and_where_it_came_from(make_lm_eval):
    config = make_lm_eval(**H2O_2, save_samples=True)
    choice, generation = run(config)
    assert [row["status"] for row in (choice, generation)] == ["done"] * 2
    assert (choice["main_metric"], generation["main_metric"]) == ("acc", "exact_match")
    assert set(choice["metrics"]) == {"acc", "acc_norm"}
    assert (choice["samples"], choice["requested_ratio"], choice["budget"]) == (3, 2.0, "2")
    assert choice["achieved_ratio"] == pytest.approx(2, rel=0.1)
    for row in (choice, generation):  # question by question, so that methods can be paired
        assert len(row["sample_values"]) == row["samples"] and row["samples_key"]
        assert statistics.fmean(row["sample_values"]) == pytest.approx(row["metrics"][row["main_metric"]])
    assert choice["settings"]["policy"]["_target_"] == "dmc.policies.H2O"
    assert {"lm-eval", "torch"} <= set(choice["provenance"]["versions"])
    samples = samples_of(config, choice)
    assert statistics.fmean(sample["acc"] for sample in samples) == choice["metrics"]["acc"]
    assert all(len(sample["resps"]) == 4 for sample in samples)


def test_saved_samples_are_of_the_ratio_in_the_row_or_none(make_lm_eval, tmp_path, monkeypatch):
    def try_two(measure, *_):
        first, _ = (measure(ratio) | {"requested_ratio": ratio} for ratio in (2.0, 4.0))
        return first

    monkeypatch.setattr("dmc.results.compare.at_bytes", try_two)
    given = {"tasks": [{"name": "local_choice", "metric": "acc"}], "policies": ["full", "h2o"]}
    config = make_lm_eval(**given, budgets=["bytes:0.5"], save_samples=True)
    _, in_bytes = run(config)
    alone = make_lm_eval(**given, budgets=[2, 4], save_samples=True, output=str(tmp_path / "alone"))
    _, *at_ratios = run(alone)
    said = [[sample["resps"] for sample in samples_of(alone, row)] for row in at_ratios]
    assert [sample["resps"] for sample in samples_of(config, in_bytes)] == said[0] != said[1]
    run(make_lm_eval(**given, budgets=["bytes:0.5"], overwrite=True))
    assert [*(Path(config.output) / "samples").iterdir()] == []


def test_each_seed_answers_every_question_once_and_errors_are_over_questions(make_lm_eval):
    sampled = {"name": "local_generation", "generation": {"do_sample": True, "temperature": 5.0, "max_gen_toks": 4}}
    choice = {"name": "local_choice", "metric": "acc"}
    seeds = {"seeds": [3, 4], "save_samples": True}
    config = make_lm_eval(tasks=[sampled, choice], **seeds)
    both, once = run(config)
    assert (both["samples"], once["samples"]) == (6, 3) and len(both["sample_values"]) == 6
    assert both["contexts"] == [0, 1, 2, 0, 1, 2] and "contexts" not in once
    assert both["settings"]["lm_eval"]["seeds"] == [3, 4] and "seeds" not in once["settings"]["lm_eval"]
    folder = Path(config.output) / "samples" / both["key"].replace("/", "__")
    said = [(folder / f"seed{seed}" / "local_generation.jsonl").read_text() for seed in (3, 4)]
    first, second = ([json.loads(line)["resps"] for line in text.splitlines()] for text in said)
    assert len(first) == len(second) == 3 and first != second


def test_seeds_of_one_question_are_no_independent_evidence():
    row = {"samples": 2, "prompts_cut": 0, "metrics": {"acc": 0.5}, "errors": {"acc": 0.1}, "samples_key": "a"}
    found = over_seeds(
        [row | {"sample_values": [1.0, 0.0]}, row | {"sample_values": [1.0, 1.0], "metrics": {"acc": 1.0}}]
    )
    assert found["metrics"] == {"acc": 0.75} and found["sample_values"] == [1.0, 0.0, 1.0, 1.0]
    assert estimate([found["sample_values"]], found["contexts"]).num_contexts == 2
    assert over_seeds([row]) is row and "sample_values" not in over_seeds([row, row])


MADE_TASK = """
task: made
custom_dataset: !function make.documents
test_split: test
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
generation_kwargs: {until: [], max_gen_toks: 4}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
MADE_DOCUMENTS = """
import datasets

def documents(max_seq_lengths, pretrained, **settings):
    rows = [{"prompt": "alpha " * length, "answer": pretrained} for length in max_seq_lengths]
    return {"test": datasets.Dataset.from_list(rows)}
"""


def test_a_cell_is_refused_when_a_file_of_the_users_tasks_has_changed(make_lm_eval, tasks_folder, tmp_path):
    folder = shutil.copytree(tasks_folder, tmp_path / "tasks")
    config = make_lm_eval(tasks=["local_generation"], tasks_folder=str(folder))
    run(config)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "code.pyc").write_text("no part of a task")
    assert len(run(config)) == 1
    task = folder / "generation.yaml"
    task.write_text(task.read_text().replace("doc_to_text: prompt", "doc_to_text: answer"))
    with pytest.raises(ValueError, match=r"with lm_eval.content=\w+, not \w+: give overwrite=true"):
        run(config)


def test_a_task_that_makes_its_data_gets_the_model_and_the_settings(make_lm_eval, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "made.yaml").write_text(MADE_TASK)
    (folder / "make.py").write_text(MADE_DOCUMENTS)
    settings = {"max_seq_lengths": [3, 5]}
    config = make_lm_eval(tasks=["made"], tasks_folder=str(folder), task_settings=settings, save_samples=True)
    (row,) = run(config)
    assert [sample["doc"] for sample in samples_of(config, row)] == [
        {"prompt": "alpha " * length, "answer": next(iter(config.models.values()))} for length in (3, 5)
    ]


@pytest.mark.parametrize("policies", [{}, H2O_2], ids=["full", "h2o"])
def test_a_hidden_question_comes_when_its_context_has_been_compressed(policies, make_lm_eval, folders):
    asked = {"tasks": [{"name": "local_generation", "question_marks": ["zeta", " "]}], "question": "both"}
    config = make_lm_eval(**asked, **policies, save_samples=True, max_gen_toks=4)
    rows = run(config)
    assert [(row["status"], row["question"], row["task"]) for row in rows] == [
        ("done", question, f"local_generation:{question}") for question in ("known", "hidden")
    ]
    assert (rows[1]["benchmark"], rows[1]["members"]) == ("local_generation:hidden", ["local_generation:hidden"])
    frame = Store(Path(config.output) / "cells.jsonl").frame()
    assert {line.question for line in summarize(frame).itertuples()} == {"known", "hidden"}
    model, tokenizer = load_with_tokenizer(str(folders.stock))
    params = SamplingParams(max_new_tokens=4, temperature=0.0, stop=("gam", " delta"))
    for sample in samples_of(config, rows[1]):
        context, question = re.fullmatch("(.*)( .*?)", sample["doc"]["prompt"]).groups()  # the last word
        engine = Engine(model, tokenizer, H2O(budget=Budget(ratio=2.0)) if policies else None)
        with engine.session() as session:
            session.feed(context)
            alone = session.generate(tokenizer(question, add_special_tokens=False)["input_ids"], params)
        assert sample["resps"] == [[alone.text]]
    spaces = Benchmark("a", context_field="context").question_at("Read: alpha  \nWhy?", {"context": " alpha  "})
    assert spaces == len("Read: alpha")  # of a context, spaces at the end are no part


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "local_generation", "question_marks": ["Why"]}, "no question of local_generation begins in"),
        ({"name": "local_choice", "context_field": "question"}, "likelihoods has no separate question"),
    ],
)
def test_a_question_that_cannot_be_hidden_fails_its_task(task, message, make_lm_eval):
    (row,) = run(make_lm_eval(tasks=[task], question="hidden"))
    assert row["status"] == "failed" and message in row["error"]


def test_a_row_keeps_the_settings_that_change_results(make_lm_eval):
    def settings(**changes):
        (cell,) = plan_grid(make_lm_eval(**{"tasks": ["local_choice"], **changes}), CONFIGS)
        return cell.key, json.dumps(cell.row["settings"])

    assert settings(output="elsewhere", save_samples=True) == settings(chat_template=False) == settings()
    named = [
        {"tasks": [{"name": "local_choice", **settings_of_task}]}
        for settings_of_task in ({"num_fewshot": 2}, {"metric": "acc_norm"})
    ]
    changes = [{}, *named, {"limit": None}, {"seed": 1}, {"chat_template": True}, {"engine": {"block_size": 32}}]
    assert len({settings(**change) for change in changes}) == len(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": [{"name": "a", "member": []}]}, "did you mean 'members'"),
        ({"tasks": [BOTH, "local_choice"]}, "'local_choice' is given twice"),
        ({"question": "hidden"}, "it is unknown where questions of 'both' begin; give the task a context_field"),
        ({"question": "both"}, "question=both: it is unknown where questions of 'both' begin"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(changes, message, make_lm_eval, tmp_path):
    with pytest.raises(ValueError, match=message):
        plan_grid(make_lm_eval(**changes), CONFIGS)
    assert not (tmp_path / "out").exists()


def test_the_metric_that_is_shown_must_be_there():
    filtered = ["exact_match,strict", "exact_match,loose"]
    assert Benchmark("a", metric=["acc_norm", "acc"]).choose(["acc", "f1"]) == "acc"
    assert Benchmark("a", metric="exact_match").choose(filtered) == filtered[0]
    assert Benchmark("a", metric=filtered[1]).choose(filtered) == filtered[1]
    with pytest.raises(ValueError, match="metric='f2' is none of acc, f1"):
        Benchmark("a", metric="f2").choose(["acc", "f1"])


SELECTIONS = sorted(path.stem for path in (CONFIGS / "evaluation").glob("*.yaml"))


@pytest.fixture(scope="module")
def everything(tasks_folder):
    """The tasks that papers name: listing all that lm-eval has takes ten seconds."""
    names = ["aime", "arc", "coqa", "glue", "gsm8k", "hellaswag", "humaneval", "infinitebench", "longbench", "mathqa"]
    names += ["minerva_math", "mmlu/default", "openbookqa", "piqa", "ruler", "super_glue", "truthfulqa", "winogrande"]
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in names]
    return TaskManager(include_path=[*folders, LONG_CONTEXT, tasks_folder], include_defaults=False)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_task_and_metric_of_every_paper_is_known_to_lm_eval(selection, everything, monkeypatch):
    monkeypatch.setenv(CODE_CONSENT, "1")
    for benchmark in read_benchmarks([selection], CONFIGS / "evaluation"):
        check_tasks(benchmark.tasks, everything)
        for name in benchmark.tasks:
            config = everything.task_index[name].cfg
            metrics = [metric["metric"] for metric in config.get("metric_list", config.get("aggregate_metric_list"))]
            filters = [filter_["name"] for filter_ in config.get("filter_list", [])]
            if name == "humaneval":  # a function of the task's, which answers with this name
                metrics = ["pass@1"]
            assert benchmark.choose([f"{metric},{kind}" for metric in metrics for kind in filters] or metrics)


def test_the_questions_of_ruler_and_longbench_can_be_hidden():
    folder, selections = Path(lm_eval.tasks.__file__).parent, CONFIGS / "evaluation"
    (ruler,) = read_benchmarks(["ruler_13"], selections)
    for name in ("niah", "vt", "cwe", "fwe", "qa"):
        source = (folder / "ruler" / f"{name}_utils.py").read_text().replace("\\n", "\n")
        template = max(re.findall(r'"""(.*?)"""', source, flags=re.S), key=lambda text: text.count("{context}"))
        for text in (template, template.replace("are all", "is")):  # as RULER writes it of one
            assert ruler.question_at(text, {}) > text.index("{context}")
    (longbench,) = read_benchmarks(["longbench_16"], selections)
    for name in longbench.tasks:
        source = (folder / "longbench" / f"{name.removeprefix('longbench_')}.yaml").read_text()
        (text,) = re.findall(r"^doc_to_text: (.*)$", source, flags=re.M)
        assert longbench.question_at(text, {"context": "{{context}}"}) < len(text) - 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("local_choise", "'local_choise' is unknown; did you mean 'local_choice'"),
        ("dmc_papr", "did you mean 'dmc_paper'"),
        ("xyzxyzxyz", "`lm-eval ls tasks` lists what there is"),
        ("humaneval", f"runs code that the model writes: set {CODE_CONSENT}=1"),
        ("ai2_arc", "'ai2_arc' has no score of its own; name the tasks to average"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused(name, message, everything):
    with pytest.raises(ValueError, match=message):
        check_tasks([name], everything, SELECTIONS)


def test_our_tasks_and_lm_evals_stand_in_one_grid_with_policies_on_what_gates_leave(make_lm_eval, folders):
    models = {"base": str(folders.stock), "small": str(folders.compressed)}
    policies = {"policies": ["full", "h2o", "snapkv"], "budgets": [4]}
    config = make_lm_eval(models=models, tasks=[NEEDLE, BOTH], limit=2, **policies)
    rows = run(config)
    names = ("needle", "local_choice", "local_generation")
    assert [(row["model"], row["policy"], row["task"], row["status"]) for row in rows] == [
        (model, policy, task, "done")
        for model, fitting in (("base", ["full", "h2o", "snapkv"]), ("small", ["full", "snapkv"]))
        for policy in fitting
        for task in names
    ]
    table = write_tables(Store(Path(config.output) / "cells.jsonl"), Path(config.output))
    assert "### needle: exact_match" in table and "### All tasks" in table
    assert "### both: mean of 4 samples (higher is better), question known" in table
    for row, other in itertools.pairwise(rows):  # a line for each method, with the mean of the members
        if row["task"] == "local_choice":
            value = statistics.fmean(row["metrics"][row["main_metric"]] for row in (row, other))
            name = "small, learned" if row["learned"] and row["policy"] == "full" else row["method"]
            assert re.search(rf"\| {name} \|.*\| {value:.4f} ", table)


def test_a_missing_lm_eval_is_told_with_the_command_that_installs_it(folders, tmp_path, monkeypatch):
    (tmp_path / "lm_eval.py").write_text("raise ModuleNotFoundError(\"No module named 'lm_eval'\", name='lm_eval')")
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    error = run_script("compare.py", f"models={{base: {folders.stock}}}", "tasks=[piqa]")
    assert error == "error: No module named 'lm_eval': pip install '.[eval]'"
