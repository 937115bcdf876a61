import json
import re

import pytest
import torch
from covering import cover
from oracles.megatron import Weights, write
from scripts_here import run_script

from dmc import load_model, retrofit
from dmc.compression import CompressionConfig
from dmc.megatron import export_checkpoint, import_checkpoint
from dmc.training.export import export
from dmc.training.model_folder import ModelCard

VOCAB_SIZE = 21


def rank_of(folder, rank):
    return torch.load(folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)


def tensors_of(content):
    return {name: value for name, value in content["model"].items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("tied", "tensor_size", "gates"), cover((False, True), (1, 2, 4), ({}, {"dmc_init_val": None})), ids=str
)
def test_shards_come_back_bit_by_bit(tied, tensor_size, gates, tmp_path):
    source = write(Weights(groups=4, tied=tied), tmp_path / "source", sizes=(tensor_size, 1), **gates)
    folder = import_checkpoint(source, tmp_path / "folder", vocab_size=VOCAB_SIZE)
    back = export_checkpoint(folder, tmp_path / "back", tensor_size=tensor_size, vocab_multiple=24 // tensor_size)
    assert (back / "latest_checkpointed_iteration.txt").read_text() == "release"
    for rank in range(tensor_size):
        first, second = rank_of(source / "iter_0000040", rank), rank_of(back / "release", rank)
        expected, got = tensors_of(first), tensors_of(second)
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert torch.equal(value, got[name]), name
        stored, written = vars(first["args"]), vars(second["args"])
        written["num_query_groups"], written["group_query_attention"] = 1, False  # one way of two to say it
        known = {
            name: value for name, value in stored.items() if value is not None and (gates == {} or "dmc" not in name)
        }
        assert {name: written.get(name) for name in known} == known


@pytest.mark.parametrize(("family", "tensor_size"), [("stock", 2), ("compressed", 1), ("compressed", 2)])
def test_folder_comes_back_with_the_same_weights_gates_and_logits(family, tensor_size, make_stock, tmp_path):
    model = make_stock()
    if family == "compressed":
        model = retrofit(model, CompressionConfig(decision_offset=0.25, omega_offset=0.25, window_size=5))
    model.save_pretrained(tmp_path / "folder")
    exported = export_checkpoint(tmp_path / "folder", tmp_path / "megatron", tensor_size=tensor_size)
    back = load_model(import_checkpoint(exported, tmp_path / "back"))
    assert type(back) is type(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, back.state_dict()[name]), name
    ours, theirs = model.config.to_dict(), back.config.to_dict()
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing <= {"bos_token_id", "eos_token_id", "dtype", "_name_or_path", "transformers_version"}


def test_ranks_share_a_padded_vocabulary(make_stock, tmp_path):
    make_stock().save_pretrained(tmp_path / "folder")
    exported = export_checkpoint(tmp_path / "folder", tmp_path / "out", tensor_size=2, vocab_multiple=32)
    contents = [rank_of(exported / "release", rank) for rank in range(2)]
    tables = [content["model"]["embedding.word_embeddings.weight"] for content in contents]
    assert [tuple(table.shape) for table in tables] == [(64, 48), (64, 48)]
    assert contents[0]["args"].padded_vocab_size == 128
    assert (tables[1][83 - 64 :] == tables[1][82 - 64]).all()


def test_each_file_holds_its_own_share_and_no_more(make_stock, tmp_path):
    make_stock(hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "folder")
    one = export_checkpoint(tmp_path / "folder", tmp_path / "one", vocab_multiple=4)
    two = export_checkpoint(tmp_path / "folder", tmp_path / "two", tensor_size=2, vocab_multiple=2)
    size, *_ = (path.stat().st_size for path in one.rglob("*.pt"))
    assert all(path.stat().st_size < 0.6 * size for path in two.rglob("*.pt"))


def test_transformer_engine_finds_its_extra_states(make_stock, tmp_path):
    make_stock().save_pretrained(tmp_path / "folder")
    exported = export_checkpoint(tmp_path / "folder", tmp_path / "out")
    model = rank_of(exported / "release", 0)["model"]
    states = sorted(name for name in model if name.startswith("decoder.layers.1.") and name.endswith("_extra_state"))
    assert [name.split(".")[-2] for name in states] == ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"]


def test_calibrated_gates_keep_their_decisions_under_one_offset(make_stock, tmp_path):
    model = retrofit(make_stock(), CompressionConfig(decision_offset=0.4, omega_offset=5.0))
    model.save_pretrained(tmp_path / "folder")
    exported = export_checkpoint(tmp_path / "folder", tmp_path / "megatron")
    back = load_model(import_checkpoint(exported, tmp_path / "back"))
    assert back.compression.decision_offset == back.compression.omega_offset == 5.0
    tokens = torch.randint(83, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = (network(tokens, use_cache=False).logits for network in (model, back))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "gates", "options", "message"),
    [
        ({}, {"delay": 4}, {}, "delay=4: Megatron's gates merge at once"),
        ({}, {"delay": 4, "action": "drop"}, {}, "action='drop', delay=4"),
        ({}, {"neuron_index": 0}, {}, "neuron_index=0"),
        ({}, {"eps": 0.1}, {}, "eps=0.1"),
        ({}, {"decision_offset": -0.5}, {}, "decision_offset=-0.5 and omega_offset=5.0 differ"),
        ({}, {}, {"tensor_size": 3}, "num_key_value_heads=2 cannot be divided among 3 ranks evenly"),
        ({"intermediate_size": 97}, {}, {"tensor_size": 2}, "intermediate_size=97 cannot be divided among 2"),
        ({}, {}, {"tensor_size": 0}, "tensor_size=0"),
        ({"family": "qwen3"}, {}, {}, "model_type='dmc_qwen3' is not written for Megatron"),
        ({"attention_bias": True}, {}, {}, "biases are not written for Megatron"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
            {},
            {},
            "rope_type='linear'",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.5}}, {}, {}, "rope_theta=100.5"),
    ],
)
def test_what_megatron_has_no_form_for_is_refused(changes, gates, options, message, make_stock, tmp_path):
    retrofit(make_stock(**changes), CompressionConfig(**gates)).save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "folder", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_missing_source_and_occupied_output_are_named(make_stock, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        export_checkpoint(tmp_path / "absent", tmp_path / "out")
    make_stock().save_pretrained(tmp_path / "folder")
    export_checkpoint(tmp_path / "folder", tmp_path / "out")
    with pytest.raises(FileExistsError, match="is not empty"):
        export_checkpoint(tmp_path / "folder", tmp_path / "out", tensor_size=2)
    export_checkpoint(tmp_path / "folder", tmp_path / "out", tensor_size=2, overwrite=True)
    assert len(list((tmp_path / "out").rglob("*.pt"))) == 2


def test_the_model_that_is_read_is_never_replaced(make_stock, tmp_path):
    model = tmp_path / "models" / "folder"
    export(make_stock(), model, tokenizer=None, card=ModelCard("tiny", "none", "none"))
    (tmp_path / "link").symlink_to(model)
    for source, output in ((model, model), (tmp_path / "link", model), (model, tmp_path / "link")):
        with pytest.raises(FileExistsError, match=r"is or holds .* which is the input: give another output"):
            export_checkpoint(source, output, overwrite=True)
    with pytest.raises(FileExistsError, match=r"is or holds .* which is the input"):
        export_checkpoint(model, tmp_path / "models", overwrite=True)
    load_model(model)


def test_scripts_import_export_and_end_with_one_error(tmp_path, capsys):
    source = write(Weights(groups=4), tmp_path / "source", sizes=(2, 1))
    folder, out = tmp_path / "folder", tmp_path / "out"
    options = [f"checkpoint={source}", f"output={folder}", "args={dmc_window_size: 7}"]
    assert not run_script("import_megatron.py", *options)
    assert load_model(folder).compression.window_size == 7
    assert not run_script("export_megatron.py", f"model={folder}", f"output={out}", "tensor_size=4")
    assert len(list(out.rglob("*.pt"))) == 4
    assert capsys.readouterr().out == f"imported {folder}\nexported {out}\n"
    error = run_script("import_megatron.py", f"checkpoint={tmp_path}", f"output={tmp_path / 'other'}")
    assert re.match(r"error: .* holds no mp_rank_00", error)
    error = run_script("export_megatron.py", f"model={folder}", f"output={tmp_path / 'other'}", "tensor_size=3")
    assert error.startswith("error: num_key_value_heads=4 cannot be divided among 3")


@pytest.mark.parametrize("differs", [True, False])
def test_the_head_of_the_tensors_goes_both_ways_whatever_the_settings_say(differs, make_stock, tmp_path):
    model = make_stock()
    if not differs:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "folder")
    config = tmp_path / "folder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    source = export_checkpoint(tmp_path / "folder", tmp_path / "megatron")
    content = rank_of(source / "release", 0)
    assert content["args"].untie_embeddings_and_output_weights == differs
    content["args"].untie_embeddings_and_output_weights = False
    if not differs:
        content["model"]["output_layer.weight"] = content["model"]["embedding.word_embeddings.weight"].clone()
    torch.save(content, source / "release" / "mp_rank_00" / "model_optim_rng.pt")
    back = load_model(import_checkpoint(source, tmp_path / "back"))
    assert back.config.tie_word_embeddings != differs
    assert torch.equal(back.lm_head.weight[: len(model.lm_head.weight)], model.lm_head.weight)
