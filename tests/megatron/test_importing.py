import argparse
import enum
import itertools
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from covering import cover
from oracles.megatron import ShardedOracle, Weights, write
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import dmc.megatron.convert
from dmc import Engine, SamplingParams, load_model
from dmc.compression import CompressionConfig
from dmc.megatron import import_checkpoint

TOLERANCE = 1e-4
SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
DIALECTS = ("transformer_engine", "local", "legacy")
TOKENS = torch.randint(21, (40,), generator=torch.Generator().manual_seed(3)).tolist()
MULTI_HEAD = Weights(groups=4)
GROUPED = Weights(groups=2)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].double()


def weights_in(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("sizes", "groups", "window"),
    cover(SIZES, (4, 2), (3, 0), allowed=lambda sizes, groups, _: sizes[0] <= groups),
    ids=str,
)
def test_import_gives_the_logits_of_the_shards_run_token_by_token(sizes, groups, window, tmp_path):
    source = write(Weights(groups=groups), tmp_path / "source", sizes=sizes, dmc_window_size=window)
    oracle = ShardedOracle(source, sizes)
    expected = oracle.run(TOKENS, 21)
    model = load_model(import_checkpoint(source, tmp_path / "out", vocab_size=21))
    assert len(TOKENS) < oracle.entries().sum() < len(TOKENS) * oracle.entries().numel()
    torch.testing.assert_close(logits_of(model, TOKENS), expected, rtol=TOLERANCE, atol=TOLERANCE)

    engine = Engine(model, block_size=16)
    (scored,) = engine.score([TOKENS[:15]], [TOKENS[15:]])
    torch.testing.assert_close(scored.double(), expected[14:-1].log_softmax(-1), rtol=TOLERANCE, atol=TOLERANCE)
    (generation,) = engine.generate([TOKENS], SamplingParams(max_new_tokens=1, temperature=0))
    assert generation.token_ids == [int(expected[-1].argmax())]
    assert torch.equal(generation.stats.slots.cpu().long(), oracle.entries())


def test_constants_of_the_published_models_give_their_logits_too(tmp_path):
    weights = Weights(groups=4, decision_scale=8.0)
    source = write(weights, tmp_path / "source", dmc_init_val=5, dmc_window_size=12)
    oracle = ShardedOracle(source, (1, 1))
    tokens = TOKENS * 2
    expected = oracle.run(tokens, 21)
    assert oracle.entries().float().mean() < 0.8 * len(tokens)
    model = load_model(import_checkpoint(source, tmp_path / "out", vocab_size=21))
    assert model.compression == CompressionConfig()
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("sizes", "tied"), [((2, 2), False), ((1, 1), True), ((2, 2), True)], ids=str)
def test_checkpoint_without_gates_is_a_stock_llama(sizes, tied, tmp_path):
    source = write(Weights(tied=tied), tmp_path / "source", sizes=sizes, dmc_init_val=None)
    model = load_model(import_checkpoint(source, tmp_path / "out", vocab_size=21))
    assert type(model) is LlamaForCausalLM
    expected = ShardedOracle(source, sizes).run(TOKENS, 21)
    torch.testing.assert_close(logits_of(model, TOKENS), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "dialect"), [*zip(SIZES, itertools.cycle(DIALECTS), strict=False), (SIZES[-1], "legacy")], ids=str
)
def test_neither_the_cut_nor_the_spelling_changes_what_is_imported(sizes, dialect, tmp_path):
    uncut = import_checkpoint(write(MULTI_HEAD, tmp_path / "whole"), tmp_path / "one", vocab_size=21)
    source = write(MULTI_HEAD, tmp_path / "source", sizes=sizes, dialect=dialect)
    cut = import_checkpoint(source, tmp_path / "two", vocab_size=21)
    expected, got = weights_in(uncut), weights_in(cut)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name
    assert (uncut / "config.json").read_text() == (cut / "config.json").read_text()


def test_gates_are_those_of_the_stored_arguments(tmp_path):
    source = write(GROUPED, tmp_path / "source", dmc_init_val=5, dmc_window_size=12, dmc_cr=8.0)
    model = load_model(import_checkpoint(source, tmp_path / "out"))
    assert model.compression == CompressionConfig(target_ratio=8.0)
    assert model.config.vocab_size == 24
    assert model.config.num_key_value_heads == 2
    assert model.config.rope_parameters["rope_theta"] == 100.0


def test_weights_keep_their_type_and_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(dmc.megatron.convert, "FILE_SIZE", 4000)
    source = write(Weights(dtype=torch.bfloat16), tmp_path / "source")
    folder = import_checkpoint(source, tmp_path / "out", vocab_size=21)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    model = load_model(folder)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.embed_tokens.weight, Weights(dtype=torch.bfloat16).unsharded["embedding"])


def test_folder_holds_tokenizer_card_and_no_pickle(folders, tmp_path):
    source = write(Weights(vocab_size=300), tmp_path / "source", padded=304)
    folder = import_checkpoint(source, tmp_path / "out", tokenizer=str(folders.stock))
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md", ".jinja"}
    assert load_model(folder).config.vocab_size == 300
    assert str(source) in (folder / "README.md").read_text()
    assert json.loads((folder / "retrofit.json").read_text())["compression"]["window_size"] == 3


def test_objects_of_megatron_are_not_needed_to_read_its_files(tmp_path, monkeypatch):
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    model_type = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    monkeypatch.setattr(sys.modules["megatron.core.enums"], "ModelType", model_type, raising=False)
    source = write(
        GROUPED,
        tmp_path / "source",
        extra={"rng_state": [{"np_rng_state": torch.zeros(3).numpy()}]},
        model_type=model_type.encoder_or_decoder,
    )
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.delitem(sys.modules, name)
    load_model(import_checkpoint(source, tmp_path / "out"))


class Payload:
    def __reduce__(self):
        return subprocess.check_call, (["touch", "ran"],)


def test_file_that_names_code_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write(GROUPED, tmp_path / "source", extra={"hook": Payload()})
    with pytest.raises(ValueError, match=r"model_optim_rng.pt would run .*check_call"):
        import_checkpoint(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def without_arguments(path):
    content = torch.load(path, weights_only=False)
    del content["args"]
    torch.save(content, path)


def test_arguments_can_be_given_where_none_are_stored(tmp_path):
    source = write(GROUPED, tmp_path / "source")
    without_arguments(source / "iter_0000040" / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(ValueError, match="stores no argument num_layers, hidden_size, ffn_hidden_size"):
        import_checkpoint(source, tmp_path / "out")
    given = vars(GROUPED.arguments(1, 1, 24))
    folder = import_checkpoint(source, tmp_path / "out", arguments=given)
    assert type(load_model(folder)) is LlamaForCausalLM


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"rotary_interleaved": True}, {}, "rotary_interleaved=True is not of Llama: expected False"),
        ({"rotary_percent": 0.5}, {}, "rotary_percent=0.5 is not of Llama"),
        ({"normalization": "LayerNorm"}, {}, "normalization='LayerNorm' is not of Llama"),
        ({"num_layers": 3}, {}, "holds 2 layers, its num_layers says 3"),
        ({"num_attention_heads": 5, "dmc_init_val": None}, {}, "transformers cannot build a Llama"),
        ({"num_attention_heads": 8}, {}, r"linear_qkv.weight of rank 0 has shape \(128, 24\), the arguments ask for"),
        ({"untie_embeddings_and_output_weights": True}, {"ffn_hidden_size": 64}, r"linear_fc1.weight of rank 0"),
        ({"tensor_model_parallel_size": 2}, {}, r"holds 1 tensor x 1 pipeline ranks, its arguments say 2 x 1"),
        ({"dmc_window_size": -1}, {}, "window_size=-1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, given, message, tmp_path):
    source = write(GROUPED, tmp_path / "source", **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        import_checkpoint(source, tmp_path / "out", arguments=given)
    assert not (tmp_path / "out").exists()


def test_stored_argument_can_be_overruled(tmp_path):
    source = write(GROUPED, tmp_path / "source", rotary_percent=0.5, dmc_window_size=12)
    given = {"rotary_percent": 1.0, "dmc_init_val": None}
    assert type(load_model(import_checkpoint(source, tmp_path / "out", arguments=given))) is LlamaForCausalLM


@pytest.mark.parametrize(
    ("sizes", "missing", "message"),
    [
        ((2, 2), "mp_rank_01_000", "lacks tensor-parallel rank"),
        ((2, 2), "mp_rank_00_001", "lacks tensor-parallel rank"),
        ((1, 2), "mp_rank_00_001", "1 tensor x 1 pipeline ranks, its arguments say 1 x 2"),
    ],
)
def test_a_missing_rank_is_named(sizes, missing, message, tmp_path):
    rank = write(GROUPED, tmp_path / "source", sizes=sizes) / "iter_0000040" / missing
    (rank / "model_optim_rng.pt").unlink()
    with pytest.raises(FileNotFoundError, match=f"{missing}/model_optim_rng.pt is missing"):
        import_checkpoint(tmp_path / "source", tmp_path / "out")
    rank.rmdir()
    with pytest.raises(FileNotFoundError, match=message):
        import_checkpoint(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        (None, "", FileNotFoundError, "there is no folder"),
        ("notes.md", "mine", ValueError, "holds no mp_rank_00: it is not a Megatron checkpoint"),
        ("metadata.json", "{}", ValueError, "is a distributed checkpoint"),
        *(
            ("latest_checkpointed_iteration.txt", named, ValueError, "names .*: expected a number, or release")
            for named in ("../elsewhere", "/", "..")
        ),
    ],
)
def test_folders_of_another_kind_are_refused(file, content, error, message, tmp_path):
    write(GROUPED, tmp_path / "elsewhere")  # what a tracker that leads outside would find
    if file is not None:
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / file).write_text(content)
    with pytest.raises(error, match=message):
        import_checkpoint(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model0": {}}, "holds a virtual pipeline"),
        ([1, 2], "holds no Megatron model"),
        ({"model": {}, "checkpoint_version": 1.0}, "checkpoint_version 1.0"),
        ({"model": {"note": "text"}}, "note is a str, expected a tensor"),
        ({"model": {"x": torch.zeros(2)}, "args": argparse.Namespace()}, "lacks embedding.word_embeddings.weight"),
    ],
)
def test_files_with_something_else_are_refused(content, message, tmp_path):
    path = tmp_path / "source" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(tmp_path / "source", tmp_path / "out")


RANK = Path("iter_0000040", "mp_rank_01", "model_optim_rng.pt")


def cut_off(source):
    (source / RANK).write_bytes((source / RANK).read_bytes()[:-500])


def add_a_bias(source):
    for rank in ("mp_rank_00", "mp_rank_01"):
        content = torch.load(path := source / RANK.parent.with_name(rank) / RANK.name, weights_only=False)
        content["model"]["decoder.layers.0.self_attention.linear_qkv.bias"] = torch.zeros(64)
        torch.save(content, path)


def take_a_rank_of_another_run(source):
    (write(Weights(groups=2, seed=1), source.with_name("other"), sizes=(2, 1)) / RANK).replace(source / RANK)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_off, "model_optim_rng.pt is cut off"),
        (add_a_bias, r"holds decoder.layers.0.self_attention.linear_qkv.bias .*no Llama model has"),
        (take_a_rank_of_another_run, r"ranks 0 and 1 hold different decoder.layers.0.*layer_norm_weight"),
    ],
)
def test_what_is_wrong_with_a_rank_is_named(spoil, message, tmp_path):
    source = write(GROUPED, tmp_path / "source", sizes=(2, 1))
    spoil(source)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(source, tmp_path / "out")


def of_an_iteration(source):
    return source / "iter_0000040"


def of_a_release(source):
    (source / "iter_0000040").rename(source / "release")
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    return source


def beside_the_tracker(source):
    (source / "iter_0000040" / "mp_rank_00").rename(source / "mp_rank_00")
    (source / "iter_0000040").rmdir()
    return source


@pytest.mark.parametrize("lay_out", [of_an_iteration, of_a_release, beside_the_tracker])
def test_ranks_are_read_wherever_megatron_lays_them(lay_out, tmp_path):
    load_model(import_checkpoint(lay_out(write(GROUPED, tmp_path / "source")), tmp_path / "out"))


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path):
    source = write(GROUPED, tmp_path / "source")
    with pytest.raises(ValueError, match="vocab_size=25: expected 1 to 24"):
        import_checkpoint(source, tmp_path / "out", vocab_size=25)


def test_output_with_content_is_left_alone(tmp_path):
    source, thesis = write(GROUPED, tmp_path / "source"), tmp_path / "out" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    for overwrite, message in ((False, "is not empty"), (True, "holds files but no files.json")):
        with pytest.raises(FileExistsError, match=message):
            import_checkpoint(source, tmp_path / "out", overwrite=overwrite)
        assert [*thesis.parent.iterdir()] == [thesis]
    thesis.unlink()
    for _ in range(2):
        import_checkpoint(source, tmp_path / "out", overwrite=True)
    load_model(tmp_path / "out")
