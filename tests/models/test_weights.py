import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import dmc
from dmc import load_model
from dmc.compression import CompressionConfig
from dmc.models.build import assemble
from dmc.models.loading import load_tokenizer
from dmc.models.weights import empty_model, open_weights, stored_shapes, weight_files

WEIGHT = "model.layers.1.self_attn.k_proj.weight"


def load_compressed(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(params=["stock", "compressed"])
def model(request, make_stock, make_compressed):
    return make_stock() if request.param == "stock" else make_compressed()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_sharded_folders_load(model, sharded):
    loaded = load_model(sharded)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_headers_are_read_without_the_weights(model, folder):
    shapes = stored_shapes(folder)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert open_weights(folder)[WEIGHT].get_dtype() == "F32"


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, kept=kept: data[:kept] for kept in (0, 5, 100, -1, -7)),
        lambda _: b"version https://git-lfs.github.com/spec/v1\n" * 3,
        lambda _: b"\x08\0\0\0\0\0\0\0notjson!",
    ],
    ids=range(7),
)
def test_a_file_that_is_cut_off_or_of_another_kind_is_named_with_its_size(model, folder, damage):
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    for load in (load_model, load_compressed)[: 1 + model.config.model_type.startswith("dmc_")]:
        with pytest.raises(ValueError, match=rf"model\.safetensors \({path.stat().st_size} bytes\) is cut off"):
            load(folder)


def forget_a_weight(path):
    save_file({name: value for name, value in load_file(path).items() if name != WEIGHT}, path, {"format": "pt"})


def cut_a_weight(path):
    save_file(load_file(path) | {WEIGHT: torch.zeros(16, 48)}, path, {"format": "pt"})


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_config(folder, **changes):
    """Change values of a folder's config.json; None takes one away."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def pickle_the_weights(path):
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (cut_a_weight, ValueError, rf"weight {WEIGHT} has shape \(16, 48\), its config.json asks for \(32, 48\)"),
        (forget_a_weight, ValueError, rf"lacks the weight {WEIGHT} \(32, 48\)"),
        (pickle_the_weights, FileNotFoundError, r"neither model\.safetensors nor .*no pickle"),
        (lambda path: path.with_name("config.json").unlink(), FileNotFoundError, "{folder} has no config.json"),
        (lambda path: shutil.rmtree(path.parent), FileNotFoundError, "there is no folder {folder}"),
        (
            lambda path: change_config(path.parent, num_hidden_layers=1),
            *(ValueError, r"holds model\.layers\.1\..*num_hidden_layers=1: half a model"),
        ),
        (
            lambda path: change_config(path.parent, attn_implementation="someone/kernel"),
            *(ValueError, "names the attention someone/kernel, code on the hub"),
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(model, folder, damage, error, message):
    damage(folder / "model.safetensors")
    for load in (load_model, type(model).from_pretrained)[: 1 + model.config.model_type.startswith("dmc_")]:
        with pytest.raises(error, match=message.replace("{folder}", re.escape(str(folder)))):
            load(folder)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (Path.unlink, FileNotFoundError, "{} is missing"),
        (cut_in_half, ValueError, r"{} \(\d+ bytes\) is cut off"),
        (forget_a_weight, ValueError, "{} lacks " + WEIGHT),
        (
            lambda shard: cut_in_half(shard.with_name("model.safetensors.index.json")),
            *(ValueError, r"model\.safetensors\.index\.json is damaged"),
        ),
    ],
)
def test_what_is_wrong_with_a_shard_is_named(sharded, damage, error, message):
    shard = sharded / index_of(sharded)["weight_map"][WEIGHT]
    damage(shard)
    with pytest.raises(error, match=message.format(re.escape(shard.name))):
        load_model(sharded)


def test_attention_from_the_hub_is_not_assembled(folder):
    change_config(folder, attn_implementation="someone/kernel")
    with pytest.raises(ValueError, match="code on the hub"):
        assemble(AutoConfig.from_pretrained(folder), {})


def test_tied_head_may_be_absent_from_the_file(make_compressed, tmp_path):
    model = make_compressed(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in stored_shapes(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_remote_code_is_never_run(folder):
    stored = json.loads((folder / "config.json").read_text())
    stored["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')")
    load_model(folder, trust_remote_code=True)


@pytest.mark.parametrize("name", ["../elsewhere/model.safetensors", "/etc/passwd", "sub/model.safetensors", "", 3])
def test_an_index_that_leads_outside_its_folder_is_refused(sharded, name):
    index = index_of(sharded)
    shard = index["weight_map"][WEIGHT]
    (sharded.parent / "elsewhere").mkdir(exist_ok=True)
    shutil.copy(sharded / shard, sharded.parent / "elsewhere" / "model.safetensors")
    index["weight_map"] = {key: name if place == shard else place for key, place in index["weight_map"].items()}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (load_model, stored_shapes, weight_files):
        with pytest.raises(ValueError, match=r"names .*: expected files of its own folder"):
            read(sharded)


def test_weights_that_are_missing_behind_a_hub_name_are_no_warning(folder, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr("dmc.models.weights.check_weights", lambda _: None)  # a hub name has no files to look at
    monkeypatch.setattr("dmc.models.modeling.check_weights", lambda *_: None)
    with pytest.raises(ValueError, match=f"lacks the weight {WEIGHT}"):
        load_model(folder)


@pytest.mark.parametrize("compression", [None, {}])
def test_a_compressed_folder_without_the_settings_of_its_gates_is_refused(make_compressed, tmp_path, compression):
    make_compressed().save_pretrained(tmp_path)
    change_config(tmp_path, compression=compression)
    for load in (load_model, load_compressed):
        with pytest.raises(ValueError, match=r"config\.json of a dmc_llama model has no compression"):
            load(tmp_path)


def test_gates_at_their_defaults_are_written_and_read(make_stock, tmp_path):
    dmc.retrofit(make_stock(), CompressionConfig()).save_pretrained(tmp_path)
    assert load_model(tmp_path).compression == CompressionConfig()


def test_a_wrong_folder_is_called_that_before_the_hub_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"^there is no folder 'outputs/nope'; as a name of the hub: "):
        load_model("outputs/nope")
    with pytest.raises(ValueError, match=r"^there is no folder 'outputs/nope': as a name of the hub, "):
        load_tokenizer("outputs/nope")


def test_a_model_without_weights_has_the_folders_generation_settings(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5], "temperature": 0.7}))
    found = empty_model(folder, torch.float32).generation_config
    assert (found.eos_token_id, found.temperature) == ([3, 5], 0.7)
    (folder / "generation_config.json").unlink()
    assert empty_model(folder, torch.float32).generation_config.eos_token_id is None
