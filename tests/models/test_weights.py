import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import dmc
from dmc import load_model
from dmc.compression import CompressionConfig
from dmc.models.build import assemble
from dmc.models.weights import read_header, stored_shapes, weight_files

WEIGHT = "model.layers.1.self_attn.k_proj.weight"


def load_compressed(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(params=["stock", "compressed"])
def model(request: pytest.FixtureRequest, make_stock: Any, make_compressed: Any) -> Any:
    return make_stock() if request.param == "stock" else make_compressed()


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_sharded_folders_load(model: Any, sharded: Path) -> None:
    loaded = load_model(sharded)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_headers_are_read_without_the_weights(model: Any, folder: Path) -> None:
    shapes = stored_shapes(folder)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert read_header(folder / "model.safetensors")[WEIGHT]["dtype"] == "F32"


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = index_of(sharded)["weight_map"][WEIGHT]
    (sharded / shard).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{sharded / shard} is missing")):
        load_model(sharded)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_named_with_its_size(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"model\.safetensors \({path.stat().st_size} bytes\) is cut off"):
        load_model(folder)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = index_of(sharded)["weight_map"][WEIGHT]
    data = (sharded / shard).read_bytes()
    (sharded / shard).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=re.escape(shard) + r" \(\d+ bytes\) is cut off"):
        load_model(sharded)


@pytest.mark.parametrize(
    "garbage", [b"version https://git-lfs.github.com/spec/v1\n" * 3, b"\x08\0\0\0\0\0\0\0notjson!"]
)
def test_a_file_of_another_kind_is_named(folder: Path, garbage: bytes) -> None:
    (folder / "model.safetensors").write_bytes(garbage)
    with pytest.raises(ValueError, match=r"model\.safetensors .* is cut off or is no safetensors file"):
        load_model(folder)


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[WEIGHT] = torch.zeros(16, 48)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"weight {WEIGHT} has shape \(16, 48\), its config.json asks for \(32, 48\)"):
        load_model(folder)


def test_a_missing_weight_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks the weight {WEIGHT} \(32, 48\)"):
        load_model(folder)


def test_a_weight_promised_by_the_index_but_absent_is_named(sharded: Path) -> None:
    shard = index_of(sharded)["weight_map"][WEIGHT]
    weights = load_file(sharded / shard)
    del weights[WEIGHT]
    save_file(weights, sharded / shard, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{re.escape(shard)} lacks {WEIGHT}"):
        load_model(sharded)


def test_a_damaged_index_is_named(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
        load_model(sharded)


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{folder} has no config.json")):
        load_model(folder)


def test_a_folder_with_pickled_weights_only_is_refused(model: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*no pickle"):
        load_model(folder)
    if model.config.model_type.startswith("dmc_"):
        with pytest.raises(FileNotFoundError, match="no pickle"):
            load_compressed(folder)


@pytest.mark.parametrize("load", [load_compressed, load_model])
def test_auto_class_checks_compressed_folders_as_well(load: Any, make_compressed: Any, tmp_path: Path) -> None:
    make_compressed().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"model\.safetensors \(\d+ bytes\) is cut off"):
        load(tmp_path)


def test_tied_head_may_be_absent_from_the_file(make_compressed: Any, tmp_path: Path) -> None:
    model = make_compressed(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in stored_shapes(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_remote_code_is_never_run(folder: Path) -> None:
    stored = json.loads((folder / "config.json").read_text())
    stored["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')")
    load_model(folder, trust_remote_code=True)


def test_public_surface() -> None:
    assert set(dmc.__all__) >= {"Engine", "SamplingParams", "load_model", "retrofit"}


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*absent"):
        load_model(tmp_path / "absent")


@pytest.mark.parametrize("name", ["../elsewhere/model.safetensors", "/etc/passwd", "sub/model.safetensors", "", 3])
def test_an_index_that_leads_outside_its_folder_is_refused(sharded: Path, name: Any) -> None:
    index = index_of(sharded)
    shard = index["weight_map"][WEIGHT]
    (sharded.parent / "elsewhere").mkdir(exist_ok=True)
    shutil.copy(sharded / shard, sharded.parent / "elsewhere" / "model.safetensors")
    index["weight_map"] = {key: name if place == shard else place for key, place in index["weight_map"].items()}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (load_model, stored_shapes, weight_files):
        with pytest.raises(ValueError, match=r"names .*: expected files of its own folder"):
            read(sharded)


def test_attention_from_the_hub_is_refused(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"attn_implementation": "someone/kernel"}))
    with pytest.raises(ValueError, match="names the attention someone/kernel, code on the hub"):
        load_model(sharded)
    with pytest.raises(ValueError, match="code on the hub"):
        assemble(AutoConfig.from_pretrained(sharded), {})


def change_config(folder: Path, **changes: Any) -> None:
    """Change values of a folder's config.json; None takes one away."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_half_of_a_models_layers_are_not_loaded_with_a_warning(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"holds model\.layers\.1\..*num_hidden_layers=1: half a model"):
        load_model(folder)


def test_weights_that_are_missing_behind_a_hub_name_are_no_warning(folder: Path, monkeypatch: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr("dmc.models.weights.check_weights", lambda _: None)  # a hub name has no files to look at
    monkeypatch.setattr("dmc.models.modeling.check_weights", lambda *_: None)
    with pytest.raises(ValueError, match=f"lacks the weight {WEIGHT}"):
        load_model(folder)


@pytest.mark.parametrize("compression", [None, {}])
def test_a_compressed_folder_without_the_settings_of_its_gates_is_refused(
    make_compressed: Any, tmp_path: Path, compression: Any
) -> None:
    make_compressed().save_pretrained(tmp_path)
    change_config(tmp_path, compression=compression)
    for load in (load_model, load_compressed):
        with pytest.raises(ValueError, match=r"config\.json of a dmc_llama model has no compression"):
            load(tmp_path)


def test_gates_at_their_defaults_are_written_and_read(make_stock: Any, tmp_path: Path) -> None:
    dmc.retrofit(make_stock(), CompressionConfig()).save_pretrained(tmp_path)
    assert load_model(tmp_path).compression == CompressionConfig()
