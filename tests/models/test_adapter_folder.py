import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import load_model, retrofit
from dmc.models import FAMILIES
from dmc.models.adapter_folder import Base, save_gates
from dmc.models.weights import local_folder, open_weights, weights_digest
from dmc.results.models import plan_model

IDS = torch.arange(2 * 24).reshape(2, 24)
HIDDEN = {"gate_input": "hidden", "action": "drop", "delay": 2}


@pytest.fixture
def base(model_folders, tmp_path):
    shutil.copytree(model_folders / "stock", tmp_path / "models" / "base")
    return tmp_path / "models" / "base"


@pytest.fixture
def learned(base, make_compressed):
    """Return a model whose gates alone differ from the base's."""
    model = make_compressed(vocab_size=300, gates=HIDDEN)
    weights = load_model(base).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items() if name in weights)
    return model


@pytest.fixture
def adapter(base, learned, tmp_path):
    folder = tmp_path / "outputs" / "run" / "final"
    folder.mkdir(parents=True)
    save_gates(learned, folder, Base.of(str(base), base))
    learned.generation_config.save_pretrained(folder)
    for path in base.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def is_that_of(found, model):
    weights = model.state_dict()
    return set(found.state_dict()) == set(weights) and torch.equal(
        found(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits
    )


def test_the_folder_holds_what_the_gates_added_and_no_more(adapter, learned, base):
    names = {path.name for path in adapter.iterdir() if not path.name.startswith("tokenizer")}
    assert names == {"config.json", "dmc_gates.safetensors", "generation_config.json"}
    stored = load_file(adapter / "dmc_gates.safetensors")
    added = set(learned.state_dict()) - set(load_model(base).state_dict())
    assert set(stored) == added and all(torch.equal(stored[name], learned.state_dict()[name]) for name in stored)
    values = json.loads((adapter / "config.json").read_text())
    assert values["base_model_name_or_path"] == str(base) and values["base_revision"] is None
    assert values["base_digest"] == weights_digest(base) and values["compression"] == learned.config.compression


def test_gates_of_135_million_weights_take_half_a_megabyte():
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = FAMILIES["llama"].config_class(**shape, compression={"gate_input": "hidden"})
    with torch.device("meta"):
        adapters = FAMILIES["llama"](config).adapters()
    assert 4 * sum(weight.numel() for part in adapters for weight in part.parameters()) == 415_440


def test_the_loaded_model_is_saved_whole_under_its_own_name(adapter, learned, tmp_path):
    found = load_model(adapter)
    assert found.name_or_path == str(adapter) == found.config.name_or_path
    found.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole" / "dmc_gates.safetensors").exists()
    assert "base_digest" not in (tmp_path / "whole" / "config.json").read_text()
    shutil.rmtree(tmp_path / "models")
    assert is_that_of(load_model(tmp_path / "whole"), learned)


def test_a_comparison_takes_it_for_a_model_with_learned_gates(adapter):
    planned = plan_model("gates", str(adapter))
    assert planned.is_learned and planned.version
    planned.check_unchanged()


def test_dtype_is_that_which_is_asked_for(adapter, learned):
    found = load_model(adapter, dtype="bfloat16")
    assert {value.dtype for value in found.state_dict().values()} == {torch.bfloat16}
    assert all(torch.equal(value, learned.state_dict()[name].bfloat16()) for name, value in found.state_dict().items())


@pytest.mark.parametrize("name", ["../../../models/base", "models/base"])
def test_a_relative_path_counts_from_the_adapter_or_else_from_here(name, adapter, learned, tmp_path, monkeypatch):
    change(adapter, base_model_name_or_path=name)
    monkeypatch.chdir(tmp_path)
    assert is_that_of(load_model(adapter), learned)


def test_a_base_of_the_hub_is_fetched_in_its_revision(adapter, base, learned, monkeypatch):
    asked = []

    def fetch(name, revision=None, **_):
        asked.append((name, revision))
        return str(base)

    monkeypatch.setattr("dmc.models.weights.snapshot_download", fetch)
    change(adapter, base_model_name_or_path="somebody/of-the-hub", base_revision="abc")
    assert is_that_of(load_model(adapter), learned) and {*asked} == {("somebody/of-the-hub", "abc")}


def test_an_adapter_of_the_hub_is_loaded_by_its_name(adapter, learned, monkeypatch):
    config = AutoConfig.from_pretrained(adapter)
    monkeypatch.setattr("dmc.models.adapter_folder.local_folder", lambda name, _: {"me/gates": adapter}[name])
    found = FAMILIES["llama"].from_pretrained("me/gates", config=config)
    assert is_that_of(found, learned) and found.name_or_path == "me/gates"


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def replace(base, adapter, make_stock):
    make_stock(vocab_size=300, seed=1).save_pretrained(base)


def remove(base, adapter, make_stock):
    shutil.rmtree(base)


def forget(base, adapter, make_stock):
    change(adapter, base_digest=None)


def name_itself(base, adapter, make_stock):
    change(adapter, base_model_name_or_path=".")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (replace, ValueError, r"base with digest [0-9a-f]{12}, .*/base has [0-9a-f]{12}: put back that base, or learn"),
        (
            remove,
            FileNotFoundError,
            r"final holds gates alone, and their base .*/base is no folder here: put it beside",
        ),
        (forget, ValueError, r"final does not name the base of its gates \(base_model_name_or_path, base_revision"),
        (name_itself, FileNotFoundError, r"their base \. is no folder here"),
    ],
)
def test_another_base_is_refused_in_one_line(damage, error, message, base, adapter, make_stock, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    damage(base, adapter, make_stock)
    for load in (load_model, AutoModelForCausalLM.from_pretrained, open_weights):
        with pytest.raises(error, match=message) as caught:
            load(adapter)
        assert "\n" not in str(caught.value)


def test_a_base_that_changes_after_it_was_loaded_is_noticed(base, adapter, make_stock):
    load_model(adapter)
    replace(base, adapter, make_stock)
    with pytest.raises(ValueError, match="put back that base"):
        load_model(adapter)


def test_gates_of_an_adapter_belong_to_its_own_base(base, adapter):
    assert Base.of(str(adapter), local_folder(str(adapter))) == Base.of(str(base), base)


def test_a_base_of_the_hub_is_named_with_the_commit_of_its_copy(base):
    copy = base.rename(base.with_name("0123456789abcdef" * 2 + "01234567"))
    assert Base.of("somebody/of-the-hub", copy, "main") == Base("somebody/of-the-hub", copy.name, weights_digest(copy))


def test_gates_replace_those_of_a_compressed_base(learned, make_compressed, tmp_path):
    other = make_compressed(vocab_size=300, gates=HIDDEN)
    for part in other.adapters():
        part.weight.data.neg_()
    other.save_pretrained(tmp_path / "compressed")
    (tmp_path / "gates").mkdir()
    save_gates(learned, tmp_path / "gates", Base.of("compressed", tmp_path / "compressed"))
    change(tmp_path / "gates", base_model_name_or_path="../compressed")
    assert is_that_of(load_model(tmp_path / "gates"), learned)


def test_experts_of_the_base_are_read_as_its_files_hold_them(make_stock, make_gates, tmp_path):
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    stock = make_stock("qwen3_moe", **shape)
    stock.save_pretrained(tmp_path / "base")
    assert any(".experts.0." in name for name in load_file(tmp_path / "base" / "model.safetensors"))
    model = retrofit(stock, make_gates(**HIDDEN))
    for part in model.adapters():
        part.weight.data.normal_(0, 0.15)
    (tmp_path / "gates").mkdir()
    save_gates(model, tmp_path / "gates", Base.of(str(tmp_path / "base"), tmp_path / "base"))
    assert is_that_of(load_model(tmp_path / "gates"), model)
