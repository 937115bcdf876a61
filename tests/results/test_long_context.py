"""LongBench v2, SCBench and LongMemEval from folders: prompts, scores, and hidden questions."""

import json
from pathlib import Path

import pytest
from report_rows import run_grid

from dmc.results.long_context import ifeval_places, longbench_v2, longmemeval, scbench

pytestmark = pytest.mark.usefixtures("offline_lm_eval")
TURNS = {
    "scbench_kv": [("Key: alpha", "beta"), ("Key: gamma", "delta")],
    "scbench_prefix_suffix": [("alpha ... delta?", "alpha beta delta")],
    "scbench_qa_eng": [("Who?", ["Alpha", "Beta"])],
    "scbench_choice_eng": [("Which?", ["beta", "B"])],
    "scbench_vt": [("Variables?", ["VAR A", "VAR B"])],
    "scbench_many_shot": [("Input: alpha", ["(A)"])],
    "scbench_mf": [("The largest number of the list is", [7])],
}


@pytest.fixture
def data(tmp_path):
    """A folder as the user has it for each data set."""
    (tmp_path / "scbench").mkdir()
    for name, turns in TURNS.items():
        asked = [{"input": text, "answer": answer, "options": ["a", "beta", "c", "d"]} for text, answer in turns]
        line = json.dumps({"context": "alpha beta gamma " * 5, "multi_turns": asked, "id": 0})
        (tmp_path / "scbench" / f"{name}.jsonl").write_text(line + "\n")
    row = {"_id": "1", "context": "alpha beta " * 20, "question": "Which?", "answer": "B", "difficulty": "easy"}
    row |= {f"choice_{letter}": f"word {letter}" for letter in "ABCD"} | {"length": "short", "domain": "d"}
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench" / "data.json").write_text(json.dumps([row, row | {"answer": "C"}]))
    turns = [{"role": "user", "content": "alpha?", "has_answer": True}, {"role": "assistant", "content": "beta"}]
    row = {"question_id": "q1", "question_type": "multi-session", "question": "Which?", "answer": 3}
    row |= {"question_date": "2023/05/30", "haystack_dates": ["2023/05/20", "2023/05/10"]}
    (tmp_path / "memory.json").write_text(json.dumps([row | {"haystack_sessions": [turns, turns[:1]]}]))
    found = {"scbench": tmp_path / "scbench", "longbench_v2": tmp_path / "longbench"}
    return {name: str(path) for name, path in (found | {"longmemeval": tmp_path / "memory.json"}).items()}


def test_a_grid_asks_them_after_the_context_has_been_compressed(make_config, data):
    lm_eval = {"task_settings": data, "question": "hidden", "max_gen_toks": 3, "save_samples": True}
    tasks = ["scbench", "longbench_v2", "longmemeval"]
    config = make_config(tasks=tasks, policies=["h2o"], budgets=[2], lm_eval=lm_eval)
    rows = run_grid(config).rows()
    assert [(row["task"], row["status"], row["samples"]) for row in rows] == [
        ("scbench", "done", 8),
        ("longbench_v2", "done", 2),
        ("longmemeval", "done", 1),
    ]
    assert [row["main_metric"] for row in rows] == ["score", "acc", "holds_answer"]
    prompts = {}
    for file in Path(config.output, "samples").rglob("*.jsonl"):
        prompts[file.stem] = [json.loads(line)["arguments"][0][0] for line in file.read_text().splitlines()]
    context = "alpha beta gamma " * 5
    assert prompts["scbench::scbench_kv"] == [
        f"Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\nKey: {key}"
        for key in ("alpha", "gamma")
    ]
    asked = "What is the largest number of the list?\n\nThe largest number of the list is"
    assert prompts["scbench::scbench_mf"] == [f"The largest number of the list is\n\n{context}\n\n{asked}"]
    assert prompts["longbench_v2"][0].endswith(
        "alpha beta\n</text>\n\nWhat is the correct answer to this question: Which?\nChoices:\n(A) word A\n(B) word B\n"
        '(C) word C\n(D) word D\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
    )
    assert prompts["longmemeval"][0].endswith(
        "History Chats:\n\n\n### Session 1:\nSession Date: 2023/05/10\nSession Content:\n\n"
        '[{"role": "user", "content": "alpha?"}]\n\n### Session 2:\nSession Date: 2023/05/20\nSession Content:\n\n'
        '[{"role": "user", "content": "alpha?"}, {"role": "assistant", "content": "beta"}]\n'
        "\nCurrent Date: 2023/05/30\nQuestion: Which?\nAnswer:"
    )


def test_a_missing_folder_is_named_with_the_setting(data):
    with pytest.raises(FileNotFoundError, match=r"elsewhere/scbench_kv\.jsonl; give \+lm_eval\.task_settings\.scbench"):
        scbench.documents("scbench_kv", scbench="elsewhere")
    with pytest.raises(FileNotFoundError, match=r"no file; give \+lm_eval\.task_settings\.longmemeval=FILE"):
        longmemeval.documents()


@pytest.mark.parametrize(
    ("name", "prediction", "label", "score"),
    [
        ("scbench_kv", ' "beta".', "beta", 1),
        ("scbench_prefix_suffix", "alpha beta", "alpha beta delta", 0),
        ("scbench_qa_eng", "It was BETA.", ["Alpha", "Beta"], 1),
        ("scbench_many_shot", "(B)", ["(A)"], 0),
        ("scbench_vt", "var a, VAR C", ["VAR A", "VAR B", "VAR D"], 0.33),
        ("scbench_mf", " is 7.5 and 3", [7], 1),
        ("scbench_mf", "8, 7", [7], 0),
        ("scbench_mf", "7.5", [7.5], 1),
        ("scbench_mf", "none", [7], 0),
        ("scbench_choice_eng", "B. beta", ["beta", "B"], 1),
        ("scbench_choice_eng", "beta", ["beta", "B"], 1),
        ("scbench_choice_eng", "the answer is: B", ["beta", "B"], 1),
        ("scbench_choice_eng", "I say C, or B", "B", 0),
        ("scbench_choice_eng", "", "B", 0),
    ],
)
def test_answers_are_scored_as_the_data_set_does(name, prediction, label, score):
    assert scbench.process_results({"set": name, "answer": json.dumps(label)}, [prediction]) == {"score": score}


@pytest.mark.parametrize(
    ("prediction", "score"),
    [("**The correct answer is (B)**", 1), ("The correct answer is B.", 1), ("B", 0), ("The correct answer is (A)", 0)],
)
def test_a_choice_is_read_from_words(prediction, score):
    assert longbench_v2.process_results({"answer": "B"}, [prediction]) == {"acc": score}


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [("It was 3, I think.", "3", 1), ("13", "3", 0), ("The Blue-Car", "blue car", 1), ("car, blue", "blue car", 0)],
)
def test_an_answer_is_held_where_its_words_are(prediction, answer, score):
    assert longmemeval.process_results({"answer": answer}, [prediction]) == {"holds_answer": score}


def test_instructions_of_ifeval_count_by_their_place(tmp_path):
    assert ifeval_places.by_place([True, False]) == {"obeyed": 0.5, "first": 1, "last": 0}
    assert ifeval_places.by_place([False, True, False, True]) == {"obeyed": 0.5, "first": 0, "middle": 0.5, "last": 1}
    with pytest.raises(FileNotFoundError, match="google/IFEval"):
        ifeval_places.documents()
    rows = [
        {"key": 1, "prompt": "a", "instruction_id_list": ["a:b"] * count, "kwargs": [{}] * count} for count in (1, 2, 3)
    ]
    (tmp_path / "ifeval.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = ifeval_places.documents(str(tmp_path / "ifeval.jsonl"), scbench="unused")["test"]
    assert [len(row["instruction_id_list"]) for row in found] == [2, 3]


def test_ifevals_checks_are_lm_evals(make_config, tmp_path):
    for needed in ("langdetect", "immutabledict", "nltk"):
        pytest.importorskip(needed, reason="needs lm-eval[ifeval]")
    row = {
        "key": 1,
        "prompt": "Write.",
        "instruction_id_list": ["change_case:english_lowercase", "punctuation:no_comma"],
    }
    row["kwargs"] = [{}, {}]
    assert ifeval_places.process_results(row, ["a, b"])["last"] == 0
    assert ifeval_places.process_results(row, ["this is a sentence, in small letters"])["first"] == 1
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(row))
    lm_eval = {"task_settings": {"ifeval": str(tmp_path / "ifeval.jsonl")}, "max_gen_toks": 4}
    (found,) = run_grid(make_config(tasks=["ifeval_places"], lm_eval=lm_eval)).rows()
    assert found["status"] == "done" and {"obeyed", "first", "last"} <= {*found["metrics"]}
