"""A model that cannot be served or retrofitted is refused by every entry in one line, with the layer and the reason."""

import pytest
from composing import CONFIGS
from report_rows import NEEDLE
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from dmc import Engine, retrofit
from dmc.compression import CompressionConfig
from dmc.config import build_config
from dmc.data import train_tokenizer
from dmc.models.layer_check import check_layer
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import compare
from dmc.results.grid import CompareConfig
from dmc.serving.config import make_worker, read_config
from dmc.training.config import RunConfig
from dmc.training.run import train

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
ENTRIES = ("retrofit", "train", "Engine", "compare", "serve")


@pytest.fixture
def enter(run_values, tmp_path):
    """Return a function that gives a model to an entry, in memory or as a folder."""

    def call(model, entry):
        folder = tmp_path / "model"
        if not folder.exists():
            model.save_pretrained(folder)
            train_tokenizer(["some text to train on"], 300, tmp_path / "tokenizer").save_pretrained(folder)
        if entry == "retrofit":
            retrofit(model, CompressionConfig(gate_input="hidden"))
        elif entry == "train":
            train(build_config(RunConfig, run_values | {"model": str(folder)}))
        elif entry == "Engine":
            Engine(model)
        elif entry == "compare":
            grid = {"models": {"it": str(folder)}, "policies": ["full"], "budgets": [2], "tasks": [NEEDLE]}
            config = build_config(CompareConfig, {**grid, "output": str(tmp_path / "grid")})
            compare(config, CONFIGS, load_with_tokenizer)
        else:
            make_worker(read_config({"models": {"it": str(folder)}}), CONFIGS / "policy")

    return call


REFUSED = {
    "falcon_h1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "layer 0 .* falcon_h1 model is hybrid",
    ),
    "mamba": ({}, "layer 0 of this mamba model is linear_attention"),
    "gemma2": ({}, "layer 0 of this gemma2 model .*attn_logit_softcapping=50.0 and caps attention scores"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "family"),
    [
        pytest.param(entry, family, marks=() if "gemma2" == family or entry == "retrofit" else pytest.mark.slow)
        for entry in ENTRIES
        for family in REFUSED
    ],
)
def test_a_model_of_another_kind_is_refused_alike(entry, family, enter, tmp_path):
    changes, message = REFUSED[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | changes))
    with pytest.raises((ValueError, NotImplementedError), match=message) as refused:
        enter(model, entry)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists() and not (tmp_path / "grid").exists()


@pytest.mark.parametrize("entry", ["retrofit", "train"])
def test_an_attention_of_a_convention_that_is_unknown_is_not_replaced(entry, enter, monkeypatch):
    """As after a release of transformers that computes a family's attention in another way."""
    plain = modeling_qwen3.Qwen3Attention.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3Attention,
        "forward",
        lambda self, states, *args, **kwargs: plain(self, 2 * states, *args, **kwargs),
    )
    check_layer.cache_clear()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    with pytest.raises(
        ValueError, match=r"layer \d of this qwen3 model cannot be .*differs from the stock one"
    ) as refused:
        enter(model, entry)
    assert "\n" not in str(refused.value)


def test_a_layer_whose_attention_was_exchanged_is_not_replaced(make_stock):
    class Attention(modeling_qwen3.Qwen3Attention):
        pass

    model = make_stock("qwen3")
    model.model.layers[1].self_attn = Attention(model.config, 1)
    with pytest.raises(
        ValueError, match="layer 1 of this qwen3 model cannot be retrofitted: its attention is a Attention"
    ):
        retrofit(model, CompressionConfig())
