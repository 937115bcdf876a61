"""A compressed folder where Hugging Face's and lm-eval's own entry points are used."""

import functools
import json
import shutil
import sys

import pytest
from transformers import AutoTokenizer, pipeline

from dmc import Engine, SamplingParams, load_model
from dmc.budget import Budget
from dmc.policies import H2O

PROMPTS = ["alpha beta gamma", "delta", "epsilon alpha beta delta gamma"]
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def generate(folder, prompts):
    engine = Engine(load_model(folder), AutoTokenizer.from_pretrained(folder))
    return [
        generation.text for generation in engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0.0))
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_text_generation_pipeline_writes_what_the_engine_writes(batch_size, folders):
    write = pipeline("text-generation", model=str(folders.compressed), device="cpu")
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False, "batch_size": batch_size}
    texts = [reply["generated_text"] for (reply,) in write(PROMPTS, **options)]
    assert texts == generate(folders.compressed, PROMPTS)


def test_a_conversation_goes_through_the_template_in_the_folder(folders, tmp_path):
    folder = shutil.copytree(folders.compressed, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    conversation = [{"role": "user", "content": "alpha beta"}]
    write = pipeline("text-generation", model=str(folder), device="cpu")
    (reply,) = write(conversation, max_new_tokens=12, do_sample=False)
    (answer,) = generate(folder, ["<user>alpha beta<assistant>"])
    assert reply["generated_text"] == [*conversation, {"role": "assistant", "content": answer}]


@pytest.fixture
def lm_eval_in_this_process(tasks_folder, tmp_path, monkeypatch, offline_lm_eval):
    """Run `python -m dmc.commands.lm_eval` over the local tasks; gives what it has written."""
    import lm_eval.tasks

    import dmc.commands.lm_eval

    without_defaults = functools.partial(
        lm_eval.tasks.TaskManager, include_defaults=False
    )  # listing all tasks takes seconds
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", without_defaults)

    def run(model, arguments, *options, tasks=TASKS):
        command = [
            "dmc.commands.lm_eval",
            "--model",
            model,
            "--model_args",
            arguments,
            "--tasks",
            *tasks,
            "--device",
            "cpu",
        ]
        command += ["--include_path", str(tasks_folder), "--output_path", str(tmp_path / "out"), *options]
        monkeypatch.setattr(sys, "argv", command)
        dmc.commands.lm_eval.main()
        (file,) = (tmp_path / "out").rglob("results_*.json")
        return json.loads(file.read_text())

    return run


TASKS = ["local_choice", "local_generation", "local_rolling"]


WITH_POLICY = "dmc", ",policy=h2o,ratio=4,policy.recent=4,engine.block_size=32", H2O(budget=Budget(ratio=4), recent=4)


@pytest.mark.parametrize(
    ("model", "arguments", "policy", "tasks"),
    [
        pytest.param("hf", "", None, TASKS, marks=pytest.mark.slow),  # test_harness.py compares with this adapter
        ("dmc", "", None, TASKS),
        (*WITH_POLICY, TASKS[:2]),
        pytest.param(*WITH_POLICY, TASKS[2:], marks=pytest.mark.slow),  # thousands of tokens, one by one
    ],
)
def test_lm_evals_own_command_line_gives_the_engines_numbers(
    model, arguments, policy, tasks, folders, tasks_folder, lm_eval_in_this_process
):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from dmc.results.harness import EngineLM

    folder = folders.stock if policy else folders.compressed
    found = lm_eval_in_this_process(model, f"pretrained={folder}{arguments}", "--batch_size", "3", tasks=tasks)
    engine = Engine(load_model(folder), AutoTokenizer.from_pretrained(folder), policy)
    manager = TaskManager(include_path=str(tasks_folder))
    ours = simple_evaluate(model=EngineLM(engine), tasks=tasks, task_manager=manager, bootstrap_iters=0)
    for task in tasks:
        for name, value in ours["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, abs=1e-4, rel=1e-6)
    if model == "dmc":
        assert found["config"]["cache"]["mean_achieved_ratio"] > 1.2
    if policy:
        assert found["config"]["policy"]["_target_"] == f"dmc.policies.{type(policy).__name__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("policy=h20,ratio=4", "policy[0]='h20' is not in configs/policy; did you mean 'h2o'?"),
        ("policy=h2o", "H2O needs a budget"),
        ("ratio=4", "the full cache has no budget"),
        ("policy=h2o,ratio=4,policy.recnt=3", "unknown setting recnt: did you mean 'recent'?"),
        ("polcy=h2o", "model_args: 'polcy' is unknown; did you mean 'policy'?"),
        ("engine.block_size=0", "engine.block_size=0: expected greater than or equal to 1"),
    ],
)
def test_arguments_of_the_model_that_make_no_sense_are_told_in_one_line(
    arguments, message, folders, lm_eval_in_this_process, tmp_path
):
    with pytest.raises(SystemExit) as ended:
        lm_eval_in_this_process("dmc", f"pretrained={folders.stock},{arguments}")
    assert str(ended.value).startswith("error: ") and message in str(ended.value)
    assert "\n" not in str(ended.value) and not (tmp_path / "out").exists()
