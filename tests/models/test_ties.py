"""The head of a model is the one in its file, whatever its configuration says of it."""

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_families import stock_of
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import load_model, retrofit
from dmc.compression import CompressionConfig
from dmc.models import FAMILIES
from dmc.models.build import assemble, twin
from dmc.models.tensor_parallel import load_shard
from dmc.models.weights import empty_model, read_model_config
from dmc.ranks import Ranks
from dmc.training.checkpoints import weights_of

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
GATES = {"gate_input": "hidden", "decision_offset": 40.0}
"""Gates that are closed on the tiny models."""
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def write(folder, model, says_tied, head):
    """Write a model with a head of its own, a copy of the embedding, or none, under a configuration that says so."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING] = weights[EMBEDDING].clone()
    generator = torch.Generator().manual_seed(99)
    heads = {
        "own": 0.2 * torch.randn(weights[EMBEDDING].shape, generator=generator),
        "last row": torch.cat([weights[EMBEDDING][:-1], weights[EMBEDDING][-1:] + 1e-3]),
        "equal": weights[EMBEDDING].clone(),
    }
    weights.pop(HEAD, None)
    if head != "none":
        weights[HEAD] = heads[head]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": says_tied}))


def head_in(folder):
    """Read the head from the files alone."""
    weights = load_file(folder / "model.safetensors")
    return weights[HEAD] if HEAD in weights else weights[EMBEDDING]


def resaved(model, folder):
    model.save_pretrained(folder)
    return load_model(folder)


def from_hugging_face(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def with_gates(model):
    return retrofit(model, CompressionConfig(**GATES))


def as_checkpoint(model):
    """Take what a checkpoint keeps of a model: its configuration as JSON, and every weight once."""
    values = json.loads(model.config.to_json_string(use_diff=False))
    return assemble(AutoConfig.for_model(**values), {name: value.data for name, value in weights_of(model).items()})


WAYS = {
    "loaded": lambda folder, _: load_model(folder),
    "loaded, twin": lambda folder, _: twin(load_model(folder), torch.float64).float(),
    "loaded, saved": lambda folder, out: resaved(load_model(folder), out),
    "loaded, checkpoint": lambda folder, _: as_checkpoint(load_model(folder)),
    "transformers', twin": lambda folder, _: twin(from_hugging_face(folder)),
    "with gates": lambda folder, _: with_gates(load_model(folder)),
    "with gates, saved": lambda folder, out: resaved(with_gates(load_model(folder)), out),
    "with gates, twin, checkpoint": lambda folder, _: as_checkpoint(twin(with_gates(load_model(folder)))),
    "transformers', with gates, saved": lambda folder, out: resaved(with_gates(from_hugging_face(folder)), out),
    "with gates, by transformers": lambda folder, out: (
        resaved(with_gates(load_model(folder)), out) and from_hugging_face(out)
    ),
}


CASES = [(True, "own"), (True, "last row"), (True, "equal"), (True, "none"), (False, "own"), (False, "equal")]
TINY = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "num_layers": 1}


@pytest.mark.parametrize(("says_tied", "kind"), CASES)
def test_every_way_from_a_folder_keeps_its_head(says_tied, kind, make_stock, tmp_path):
    write(tmp_path, make_stock(**TINY), says_tied, kind)
    expected = head_in(tmp_path)
    for way, walk in WAYS.items():
        model = walk(tmp_path, tmp_path / way).eval()
        assert torch.equal(model.lm_head.weight, expected), way
        is_one = model.lm_head.weight is model.model.embed_tokens.weight
        assert is_one == (says_tied and kind in ("equal", "none")) == model.config.tie_word_embeddings, way
        with torch.no_grad():
            hidden = model.model(IDS, use_cache=False).last_hidden_state
            torch.testing.assert_close(model(IDS, use_cache=False).logits, hidden @ expected.T)


STEPS = {
    "twin": twin,
    "double twin": lambda model: twin(twin(model, torch.float64), torch.float32),
    "checkpoint": as_checkpoint,
    "gates": with_gates,
}


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    says_tied=st.booleans(),
    is_one=st.booleans(),
    row=st.none() | st.integers(0, 82),
    first=st.sampled_from(["twin", "gates"]),
    others=st.lists(st.sampled_from(sorted(STEPS)), max_size=2),
    trained=st.booleans(),
)
def test_every_way_from_a_model_keeps_its_head(make_stock, says_tied, is_one, row, first, others, trained):
    """The head is the embedding, or one that differs in a row or everywhere, whatever the configuration says."""
    model = make_stock(**TINY)
    embedding = torch.arange(83 * 8.0).view(83, 8).sin()
    model.model.embed_tokens.weight.data.copy_(embedding)
    model.lm_head.weight.data.copy_(embedding)
    differs = slice(None) if row is None else row
    if is_one:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        model.lm_head.weight.data[differs] += 1
    model.config.tie_word_embeddings = says_tied
    expected = embedding.clone()
    if not is_one:
        expected[differs] += 1
    for step in (first, *others):
        model = STEPS[step](model)
    if trained:  # an update of the embedding reaches the head of a model that has one tensor for both
        model.model.embed_tokens.weight.data[0, 0] = 7.0
        expected[0, 0] = 7.0 if is_one else expected[0, 0]
    assert torch.equal(model.lm_head.weight, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_of_any_family_keep_a_head_that_the_configuration_denies(family, tmp_path):
    write(tmp_path, stock_of(family), True, "own")
    stock = from_hugging_face(tmp_path).eval()
    compressed = with_gates(copy.deepcopy(stock)).eval()
    assert torch.equal(compressed.lm_head.weight, head_in(tmp_path))
    with torch.no_grad():
        expected, found = (model(IDS, use_cache=False).logits for model in (stock, compressed))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_loss_of_an_untied_model_is_that_of_its_own_head(make_stock, tmp_path):
    write(tmp_path, make_stock("qwen2"), True, "own")
    stock, compressed = from_hugging_face(tmp_path), with_gates(from_hugging_face(tmp_path))
    with torch.no_grad():
        expected, found = (float(model(IDS, labels=IDS, use_cache=False).loss) for model in (stock, compressed))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("head", ["own", "equal", "none"])
def test_a_model_without_weights_is_untied_as_its_file_is(head, make_stock, tmp_path):
    write(tmp_path, make_stock(), True, head)
    for model in (empty_model(tmp_path, torch.float32), with_gates(empty_model(tmp_path, torch.float32))):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (head != "own")
    assert read_model_config(tmp_path).tie_word_embeddings == (head != "own")


@pytest.mark.parametrize("head", ["own", "equal", "none"])
def test_a_rank_that_serves_a_share_has_the_whole_head_of_the_file(head, make_stock, tmp_path, monkeypatch):
    write(tmp_path, make_stock(), True, head)
    monkeypatch.setattr(Ranks, "init_process_group", lambda: Ranks(0, 1))
    model = load_shard(tmp_path, device="cpu")
    assert torch.equal(model.lm_head.weight, head_in(tmp_path))


def test_weights_tied_by_hand_are_one_in_the_compressed_model(make_stock, tmp_path):
    model = make_stock()
    model.lm_head.weight = model.model.embed_tokens.weight
    compressed = with_gates(model)
    assert compressed.lm_head.weight is compressed.model.embed_tokens.weight
    compressed.save_pretrained(tmp_path)
    assert torch.equal(load_model(tmp_path).lm_head.weight, model.model.embed_tokens.weight)
