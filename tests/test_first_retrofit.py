"""Every command of docs/first_retrofit.md for a GPU, on a stand-in: Qwen3's classes and number of layers, tiny.

Those for two cores take the better part of an hour: their settings are read.
"""

import json
import os
import re
import shlex
import signal
import threading

import datasets
import httpx
import pytest
import torch
import yaml
from composing import CONFIGS, composed, settings_of
from documents import PAGES, ROOT
from scripts_here import run_script
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

from dmc.data import StandardLibrarySource
from dmc.serving import server
from dmc.training.model_folder import is_final
from dmc.training.stages import Plan

PAGE = PAGES[ROOT / "docs" / "first_retrofit.md"]
ON_CPU, PAGE = PAGE.split("## Qwen3-0.6B on one GPU")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
BASE = yaml.safe_load((CONFIGS / "base" / "qwen3_0p6b.yaml").read_text())
TINY = {
    "train.py": [
        "trainer.accelerator=cpu", "trainer.precision=32-true", "data.num_workers=0", "training.sequence_length=64",
        "training.batch_size=2", "training.micro_batch_size=2", "compression.delay=4",
        "training.validation_sequences=2",
        "training.stages.retrofit.length=7 steps", "training.stages.solidify.length=1 steps",
        "training.calibration_sequences=2", "training.validate_every_steps=4", "training.log_every_steps=1",
        "training.activation_checkpointing=false",
    ],
    "export.py": [],
    "compare.py": ["engine.max_batch_size=2"],
    "serve.py": ["port=0", "memory=2000000"],
}  # fmt: skip
"""Settings that make a command of the page short, behind its own."""


@pytest.fixture(scope="module")
def texts():
    source = StandardLibrarySource(split="train")
    return [text[:20_000] for text, _ in zip(source.documents(), range(30))]


@pytest.fixture(scope="module")
def stand_in(texts, tmp_path_factory):
    """Make a folder that has Qwen3's classes and layers, and else is tiny."""
    folder = tmp_path_factory.mktemp("model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]], eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    shape = BASE["shape"] | {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": len(tokenizer), "max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(folder)
    return folder


@pytest.fixture
def hub(texts, monkeypatch):
    """Stand in for the text of the hub."""

    def load_dataset(*_, streaming=False, **__):
        rows = datasets.Dataset.from_dict({"text": texts, "content": texts})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr("dmc.data.text.load_dataset", load_dataset)


@pytest.fixture
def ask_server(monkeypatch):
    """Return a function that serves as a command line says, sends a request of curl's, and stops the server."""
    plain, handlers = server.serve, {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask_server(words, curl):
        _, url, _, header, _, body = shlex.split(curl)
        answers, threads = [], []

        def ask(port):
            headers = dict([header.split(": ")])
            answers.append(httpx.post(url.replace("8000", str(port)), content=body, headers=headers, timeout=60).json())
            os.kill(os.getpid(), signal.SIGTERM)

        def started(port):
            threads.append(threading.Thread(target=ask, args=(port,)))
            threads[0].start()

        monkeypatch.setattr(server, "serve", lambda config, policies, _: plain(config, policies, started))
        assert run_script("serve.py", *words) == ""
        threads[0].join(20)
        return answers[0]

    yield ask_server
    for number, handler in handlers.items():
        signal.signal(number, handler)


def read_command(line, stand_in):
    """Return the script of a command and its words: the stand-in in place of the model, and less of everything."""
    _, command, *words = shlex.split(line.replace(BASE["path"], str(stand_in)))
    name = f"{command}.py"
    words = [
        re.sub(r"context_tokens: \d+", "num_samples: 1, context_tokens: 24, scored_tokens: 8", word) for word in words
    ]
    words = [re.sub(r"lengths: \[\d+\]", "lengths: [96], depths: [0.5], samples_per_place: 1", word) for word in words]
    words += TINY.get(name, [])
    if name == "train.py":
        words += [f"model={stand_in}"]
        is_variant = any(word.startswith("output_dir=") for word in words)
        words += ["training.sensitivity_init=null" if is_variant else "training.sensitivity_init.sequences=1"]
    return name, words


@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_a_served_model(
    stand_in, texts, hub, ask_server, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for path, part in (("corpus/0.jsonl", texts[:20]), ("held_out.jsonl", texts[20:])):
        (tmp_path / path).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    lines = [line for block in BLOCKS for line in block.splitlines()]
    done = []
    for line in lines:
        if line.startswith("dmc ") and "outputs/curves" not in line:  # the picture's are of another model
            name, words = read_command(line, stand_in)
            done.append(name)
            if name == "serve.py":
                (curl,) = (line for line in lines if line.startswith("curl"))
                answer = ask_server(words, curl)
                assert answer["usage"]["x-dmc-stats"]["achieved_ratio"] > 1, answer
            else:
                assert run_script(name, *words) == "", line
    assert set(done) == {f"{name}.py" for name in ("train", "collect", "export", "compare", "report", "plan", "serve")}
    assert done.count("train.py") == 5
    said = capsys.readouterr().out
    assert "s a step" in said and "| 4 | " in said  # both plans
    for name in ("cr4", "own_text", "cr2", "dms"):
        assert is_final(tmp_path / f"outputs/qwen3_0p6b_{name}/final")
    assert is_final(tmp_path / "exported/qwen3_0p6b_cr4")
    assert (tmp_path / "outputs/qwen3_0p6b_cr4/curves.png").stat().st_size > 10_000
    assert (tmp_path / "outputs/first_report/report.html").exists()


def test_the_picture_is_drawn_of_a_run_with_the_same_recipe():
    train, collect = (line for block in BLOCKS for line in block.splitlines() if "outputs/curves" in line)
    config, shown = composed(*shlex.split(train)[2:]), composed("experiment=qwen3_0p6b_cr4")
    assert "folder=outputs/curves" in collect
    for name in ("action", "gate_input", "decision_scale", "target_ratio", "target_counts"):
        assert getattr(config.compression, name) == getattr(shown.compression, name), name
    assert (config.training.distillation, config.training.ratio_control) == (
        shown.training.distillation, shown.training.ratio_control,
    )  # fmt: skip


ADVICE = re.findall(r"`((?:compression|training|data|trainer)\.[\w.]+=[^`]+)`", PAGE)


def test_every_advice_of_the_page_composes():
    assert len(ADVICE) >= 8
    for override in ADVICE:
        composed("experiment=qwen3_0p6b_cr4", *shlex.split(override))


def test_the_page_prints_what_the_experiment_plans():
    config = composed("experiment=qwen3_0p6b_cr4")
    plan = Plan(config.training, config.target_ratio, config.compression)
    for name, steps in plan.lengths():
        tokens = steps * config.training.tokens_per_step
        assert f"{name:<12}{steps:9,} steps {tokens:19,} tokens" in PAGE
    shape = BASE["shape"]
    per_token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    assert f"{per_token:,} bytes" in PAGE


def test_the_commands_for_two_cores_have_settings_that_exist():
    lines = [line for block in re.findall(r"```bash\n(.*?)```", ON_CPU, flags=re.S) for line in block.splitlines()]
    seen = []
    for line in lines:
        if line.startswith("dmc "):
            _, command, *words = shlex.split(line)
            seen.append(command)
            settings_of(command, *words)
    assert {*seen} == {"train", "collect", "compare", "demo", "generate", "serve"}
    folder = settings_of("train", "experiment=smollm2/cr4").output_dir  # that the next commands read
    assert f"dmc collect folder={folder}\n" in ON_CPU and f"models.cr4.path={folder}/final\n" in ON_CPU
    config = composed("experiment=smollm2/cr4")
    lengths = dict(Plan(config.training, config.target_ratio, config.compression).lengths())
    fit = config.training.regression_init.sequences
    assert f"{fit} texts" in ON_CPU
    assert lengths.keys() == {"solidify"} and f"{lengths['solidify']} steps at CR 4, without a ramp" in ON_CPU
    assert config.training.gates_only and config.training.distillation.weight == 1
    regressed = composed("experiment=smollm2/regressed")
    assert not dict(Plan(regressed.training, regressed.target_ratio, regressed.compression).lengths())
