"""A tiny stock model, its compressed twin, and a text that they have a tokenizer for."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from report_rows import NEEDLE, benchmark_rows, compare_grid, write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from dmc import retrofit
from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.data import train_tokenizer
from dmc.results.grid import CompareConfig
from dmc.results.report import read_folders, write_page

VOCAB_SIZE = 300


@dataclass(frozen=True)
class Folders:
    """Where they lie."""

    stock: Path
    compressed: Path
    text: Path


def build_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=0, initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    text = root / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    tokenizer = train_tokenizer([text.read_text()], VOCAB_SIZE, root / "tokenizer")
    found = Folders(root / "stock", root / "compressed", text)
    gates = CompressionConfig(decision_offset=0.0, target_ratio=2.0)
    for folder, model in ((found.stock, build_model()), (found.compressed, retrofit(build_model(), gates))):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found


@pytest.fixture
def make_config(folders, tmp_path):
    """Return a builder of a grid: one task and the full cache of the stock model, unless told otherwise."""

    def build(**changes):
        values = {"models": {"base": str(folders.stock)}, "policies": ["full"], "budgets": [], "tasks": [NEEDLE]}
        return build_config(CompareConfig, {**values, "output": str(tmp_path / "out"), **changes})

    return build


@pytest.fixture
def beginning_tokenizer(folders):
    """One that puts a token of its own before a text, as Llama's do; the model has room for it."""
    found = AutoTokenizer.from_pretrained(folders.stock)
    found.bos_token = found.convert_ids_to_tokens(255)
    begin = (found.bos_token, 255)
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A {begin[0]} $B", special_tokens=[begin]
    )
    return found


@pytest.fixture
def offline_lm_eval(monkeypatch):
    """lm-eval without a network, and without what takes it seconds and is not used."""
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def write_grid_page(folder, *policies):
    """Write a report of the synthetic grid and of a benchmark."""
    cells = write_rows(compare_grid(*policies), folder / "cells" / "cells.jsonl")
    speeds = write_rows(benchmark_rows(), folder / "speeds" / "cells.jsonl")
    return write_page(read_folders([cells, speeds]), folder / "report")


@pytest.fixture(scope="session")
def grid_page(tmp_path_factory):
    """A report of 8 methods."""
    return write_grid_page(tmp_path_factory.mktemp("grid"))


@pytest.fixture
def small_grid_page(tmp_path):
    """A report of 2 methods."""
    return write_grid_page(tmp_path, ("tova", "cam"))


TASK = """
task: local_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}, train: {file}}}}}
test_split: test
"""
TASKS = {
    "choice": """
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "generation": """
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
generation_kwargs: {until: ["gam", " delta"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: prompt
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


@pytest.fixture(scope="session")
def tasks_folder(tmp_path_factory):
    """Local tasks over local JSON; some texts are longer than the models' 512 positions, some end in spaces."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]

    def text(length):
        return " ".join(draw.choices(words, k=length))

    lengths = [3, 40, 9, 700, 25, 14]
    questions = [text(length) + draw.choice(["", " ", "  "]) for length in lengths]
    choices = [[" alpha", " beta", "gamma delta " + text(index), "é"] for index in range(len(lengths))]
    rows = [
        {"question": question, "choices": words, "answer": draw.randrange(4)}
        for question, words in zip(questions, choices, strict=True)
    ]
    (folder / "choice.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"prompt": text(length), "answer": "beta"} for length in lengths]
    (folder / "generation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        file = folder / ("choice.jsonl" if name == "choice" else "generation.jsonl")
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file) + task)
    return folder
