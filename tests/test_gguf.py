import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from composing import composed
from huggingface_hub import constants
from scripts_here import run_script
from tiny_gguf import TEMPLATE, WORDS, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import dmc.gguf
from dmc import load_model
from dmc.commands.export_megatron import ExportConfig
from dmc.commands.generate import GenerateConfig
from dmc.commands.plan import CapacityConfig
from dmc.gguf import describe, import_gguf, local_model
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.results.benchmark import BenchmarkConfig
from dmc.results.models import plan_model
from dmc.serving.config import read_config
from dmc.training.planning.start_checks import base_shape

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")
PROMPT = torch.tensor([[3, 40, 77, 5, 260, 9, 12]])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a GGUF file, and a model with the numbers that are in it."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    return file, write_tiny_gguf(file)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@torch.no_grad()
def test_imported_weights_are_those_of_the_file(tiny, tmp_path):
    file, expected = tiny
    folder = import_gguf(file, tmp_path / "model", "float32")
    stock = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(stock(PROMPT).logits, expected(PROMPT).logits)
    assert stock.dtype == torch.float32
    assert stock.generation_config.eos_token_id == 2
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & {
        *json.loads((folder / "config.json").read_text())
    }


def test_by_default_weights_are_rounded_to_bfloat16(tiny, tmp_path):
    file, expected = tiny
    model = load_model(import_gguf(file, tmp_path / "model"), dtype="auto")
    embedding = expected.model.embed_tokens.weight.to(torch.bfloat16)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert describe(tmp_path / "model") == f"4-bit weights, dequantized to bfloat16 in {tmp_path / 'model'}"


def test_tokenizer_and_chat_template_come_along(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(import_gguf(tiny[0], tmp_path / "model"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab c<|im_end|>")["input_ids"]) == ["ab", "Ġ", "c", "<|im_end|>"]
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(("pattern", "tokens"), [("smollm", ["ĠĠ", "1"]), ("gpt-2", ["Ġ", "Ġ", "1"])])
def test_digits_stand_apart_where_the_tokenizer_was_trained_so(tmp_path, pattern, tokens):
    write_tiny_gguf(tmp_path / "tiny.gguf", pattern)
    tokenizer = load_tokenizer(import_gguf(tmp_path / "tiny.gguf", tmp_path / "model"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("  1")["input_ids"]) == tokens


@torch.no_grad()
def test_a_file_is_imported_once_and_told_in_one_line(tiny, cache, capsys, monkeypatch):
    file, expected = tiny
    model, tokenizer = load_with_tokenizer(str(file), "float32")
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert len(tokenizer) == len(WORDS)
    assert (model(PROMPT).logits - expected(PROMPT).logits).abs().max() < 0.1 * expected(PROMPT).logits.std()
    capsys.readouterr()
    monkeypatch.setattr(dmc.gguf, "import_gguf", None)
    assert local_model(str(file)) == str(folder)
    assert capsys.readouterr().err == f"{file}: 4-bit weights, dequantized to bfloat16 in {folder}\n"


def test_processes_that_ask_at_once_import_once(tiny, cache, monkeypatch):
    imported, original = [], dmc.gguf.import_gguf
    monkeypatch.setattr(dmc.gguf, "import_gguf", lambda *given, **named: imported.append(original(*given, **named)))
    with ThreadPoolExecutor() as threads:
        folders = {*threads.map(local_model, [str(tiny[0])] * 3)}
    assert [*map(str, imported)] == [*folders]


def test_every_setting_that_names_a_model_takes_a_file(tiny, cache, tmp_path):
    file = str(tiny[0])
    folder = local_model(file)
    assert plan_model("tiny", file).settings.path == folder
    assert [model.path for model in read_config({"model": file, "models": None}).models.values()] == [folder]
    for settings in (
        GenerateConfig(file, prompt="ab"), CapacityConfig(file), BenchmarkConfig(file), ExportConfig(file, "out"),
    ):  # fmt: skip
        assert settings.model == folder
    options = [f"model={file}", f"data.tokenizer.path={file}", f"+training.distillation.path={file}"]
    run = composed("data=stdlib", "data.tokenizer.train_vocab_size=null", "data.tokenizer.folder=null", *options)
    assert (run.model, run.data.tokenizer.path, run.distillation.path) == (folder, folder, folder)
    assert base_shape(run).vocab_size == len(WORDS)


def test_generate_continues_a_prompt_with_a_file(tiny, cache, capsys):
    assert not run_script("generate.py", f"model={tiny[0]}", "prompt=ab", "max_new_tokens=3", "block_size=16")
    assert capsys.readouterr().out.startswith("ab")


def test_other_names_are_left_alone(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    for name in ("org/model", str(tmp_path), str(tmp_path / "folder.gguf")):
        assert local_model(name) == name


@pytest.mark.parametrize("kept", [0, 100, 20_000])
def test_a_file_that_is_cut_off_is_refused_before_anything_is_written(tiny, tmp_path, kept):
    (tmp_path / "cut.gguf").write_bytes(tiny[0].read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"cut.gguf is damaged, or is no GGUF file"):
        import_gguf(tmp_path / "cut.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_missing_file_and_a_missing_package_are_told(tiny, tmp_path, monkeypatch):
    error = run_script("generate.py", "model=nowhere.gguf", "prompt=ab")
    assert error.startswith("error: there is no file nowhere.gguf: give a GGUF file")
    monkeypatch.setattr(dmc.gguf, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gguf and accelerate: pip install 'dmc-retrofit\[gguf\]'"):
        import_gguf(tiny[0], tmp_path / "model")


def test_an_unknown_dtype_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="dtype='int4': expected one of float32, bfloat16, float16"):
        import_gguf(tiny[0], tmp_path / "model", "int4")
