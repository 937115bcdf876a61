"""A compressed folder where Hugging Face's and lm-eval's own entry points are used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, pipeline

from dmc import Engine, SamplingParams, load_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["alpha beta gamma", "delta", "epsilon alpha beta delta gamma"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chat_folder(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(folders.compressed, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def generate(folder: Path, prompts: list[str]) -> list[str | None]:
    engine = Engine(load_model(folder), AutoTokenizer.from_pretrained(folder))
    return [each.text for each in engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0.0))]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_text_generation_pipeline_writes_what_the_engine_writes(batch_size: int, chat_folder: Path) -> None:
    write = pipeline("text-generation", model=str(chat_folder), device="cpu")
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False, "batch_size": batch_size}
    texts = [reply["generated_text"] for (reply,) in write(PROMPTS, **options)]
    assert texts == generate(chat_folder, PROMPTS)


def test_a_conversation_goes_through_the_template_in_the_folder(chat_folder: Path) -> None:
    write = pipeline("text-generation", model=str(chat_folder), device="cpu")
    conversation = [{"role": "user", "content": "alpha beta"}]
    (reply,) = write(conversation, max_new_tokens=12, do_sample=False)
    assert reply["generated_text"][:-1] == conversation
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert prompt == "<user>alpha beta<assistant>"
    assert reply["generated_text"][-1] == {"role": "assistant", "content": generate(chat_folder, [prompt])[0]}


def test_lm_evals_own_command_line_evaluates_a_compressed_folder(
    folders: Any, tasks_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from dmc.results.harness import EngineLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [sys.executable, "-m", "dmc.lm_eval", "--model", "hf", "--tasks", "local_choice", "--device", "cpu"]
    command += ["--model_args", f"pretrained={folders.compressed}", "--include_path", str(tasks_folder)]
    done = subprocess.run(
        [*command, "--output_path", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.rglob("results_*.json")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds, and is not used
    engine = Engine(load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed))
    manager = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    own: Any = simple_evaluate(model=EngineLM(engine), tasks=["local_choice"], task_manager=manager)
    expected = own["results"]["local_choice"]
    found = json.loads(file.read_text())["results"]["local_choice"]
    assert {name: found[name] for name in expected} == pytest.approx(expected)
