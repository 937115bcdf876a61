"""NVIDIA's DMS checkpoints: folders written by hand, against a decoder written from their description alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles.step_by_step import HeadOracle, ModelOracle
from safetensors.torch import load_file, save_file

from dmc import Engine, SamplingParams, load_model
from dmc.models.weights import empty_model
from dmc.results.models import plan_model

TOLERANCE = 1e-4
KEYS = {"dms_window_size": 6, "dms_alpha_scale": 100.0, "dms_initial_alpha_offset": 5.0, "dms_cr": 8}


class DMSHead(HeadOracle):
    """Holds every token but those that leave the window marked; the token after one marks it."""

    def step(self, queries, key, value, scaling, logits=None):
        """`logits`: the adapter's number of this head."""
        position, keys, queries = len(self.decisions), self.settings.keys, [query.copy() for query in queries]
        number = queries[0][-1] if logits is None else logits
        borrows = logits is None
        self.decisions.append(int(number * keys["dms_alpha_scale"] - keys["dms_initial_alpha_offset"] > 0))
        if position > 1:  # the first token stays
            self.raw[-1]["marked"] = self.decisions[-1]
        self.raw.append({"key": self.rotate(key, position), "value": value, "position": position, "marked": 0})
        window = keys["dms_window_size"] + 1
        self.raw = [entry for entry in self.raw if position - entry["position"] < window or not entry["marked"]]
        outputs = []
        for head, query in enumerate(queries):
            if borrows and head == 0:
                query[-1] = 0
            query = self.rotate(query, position)
            if borrows and head == 0:
                query[-1] = 0
            weights = np.exp([query @ entry["key"] * scaling for entry in self.raw])
            outputs.append(sum(w * entry["value"] for w, entry in zip(weights / weights.sum(), self.raw, strict=True)))
        return outputs


class DMSModel(ModelOracle):
    head_class = DMSHead

    def norm(self, name, states):
        if name.endswith("input_layernorm"):
            self.residual = states
        return super().norm(name, states)

    def logits(self, prefix, heads, groups, keys, hidden):
        if prefix + "dms_proj_alpha.weight" not in self.weights:
            return [None] * len(heads)
        return list(self.linear(prefix + "dms_proj_alpha", self.norm(prefix + "dms_proj_alpha_norm", self.residual)))


def write_dms(folder, stock, adapter, **changes):
    """Write a DMS folder of a stock model's weights, and return its oracle."""
    stock.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | KEYS | changes
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_qwen3_dms.Qwen3ForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    weights, heads = load_file(folder / "model.safetensors"), stock.config.num_key_value_heads
    generator = torch.Generator().manual_seed(5)
    for index in range(stock.config.num_hidden_layers if adapter else 0):
        name = f"model.layers.{index}.self_attn.dms_proj_alpha"
        weights[f"{name}.weight"] = torch.randn(heads, stock.config.hidden_size, generator=generator) * 0.02
        weights[f"{name}_norm.weight"] = 1 + 0.3 * torch.randn(stock.config.hidden_size, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    oracle = DMSModel(stock, SimpleNamespace(keys=KEYS | changes, decisions="", gate_input=""))
    oracle.weights = {name: tensor.double().numpy() for name, tensor in weights.items()}
    return oracle


@pytest.mark.parametrize("adapter", [False, True], ids=["borrowed neuron", "adapter"])
@pytest.mark.parametrize("group", [1, 2])
def test_a_dms_folder_decodes_as_described(adapter, group, make_stock, make_prompts, tmp_path):
    oracle = write_dms(tmp_path / "dms", make_stock("qwen3", group=group), adapter)
    model, sequences = load_model(tmp_path / "dms"), make_prompts(50, 23)
    runs = [oracle.run(sequence) for sequence in sequences]
    assert 0.2 < runs[0].decisions.float().mean() < 0.8
    model.save_pretrained(tmp_path / "ours")
    for loaded in (model, load_model(tmp_path / "ours")):
        assert type(loaded).__name__ == "DMCQwen3ForCausalLM" and loaded.config.compression["delay"] == 7
        with torch.no_grad():
            parallel = loaded(torch.tensor(sequences[:1]), use_cache=False).logits[0].log_softmax(-1)
        torch.testing.assert_close(parallel.double(), runs[0].log_probs, rtol=0, atol=TOLERANCE)
        for begin in (1, 20):  # nearly all token by token, and as a prompt
            engine = Engine(loaded, prefill_chunk_size=7 if begin == 20 else None)
            scored = engine.score(
                [sequence[:begin] for sequence in sequences], [[*sequence[begin:], 0] for sequence in sequences]
            )
            for run, got in zip(runs, scored, strict=True):
                torch.testing.assert_close(got.double(), run.log_probs[begin - 1 :], rtol=0, atol=TOLERANCE)
        for sequence, run in zip(sequences, runs, strict=True):
            (generation,) = Engine(loaded).generate([sequence], SamplingParams(max_new_tokens=1, temperature=0.0))
            assert torch.equal(generation.stats.slots, run.entries)
    for name in ("dms", "ours"):
        assert plan_model(name, str(tmp_path / name)).target_ratio == 8.0
    assert "dms_" not in (tmp_path / "ours" / "config.json").read_text()


def test_one_decision_for_a_layer_is_that_of_its_first_head(make_stock, make_prompts, tmp_path):
    write_dms(tmp_path, make_stock("qwen3"), adapter=True, dms_alpha_per="layer")
    model, tokens = load_model(tmp_path), make_prompts(40)[0]
    (generation,) = Engine(model).generate([tokens], SamplingParams(max_new_tokens=1, temperature=0.0))
    assert (generation.stats.slots == generation.stats.slots[:, :1]).all() and (generation.stats.slots < 40).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dms_alpha_per": "layer"}, "dms_alpha_per='layer' without an adapter"),
        ({"dms_disable_eviction": True}, "dms_disable_eviction=True"),
        ({"dms_window_size": -1}, "delay"),
    ],
)
def test_dms_settings_that_ours_cannot_be_are_refused(changes, message, make_stock, tmp_path):
    write_dms(tmp_path, make_stock("qwen3"), adapter=False, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_an_adapter_without_its_norm_is_refused_and_so_is_who_would_overlook_the_gates(make_stock, tmp_path):
    write_dms(tmp_path, make_stock("qwen3"), adapter=True)
    with pytest.raises(ValueError, match="is a DMS checkpoint"):
        empty_model(tmp_path, torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.dms_proj_alpha_norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"expected model\.layers\.1\.self_attn.dms_proj_alpha\.weight"):
        load_model(tmp_path)
