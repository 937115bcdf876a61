"""The fit of KVpop's scorer: its target beside dense attention, what it learns, what it refuses."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dmc.config import build_config
from dmc.data import train_tokenizer
from dmc.policies.delayed_scorer import DelayedScorer, ScorerConfig
from dmc.training.scorer_fit import FitConfig, ObservedAttention, fit_scorer

LENGTH, WINDOW = 150, 5
"""More than one block of queries."""


def stock(layers=2, vocab_size=50, attention="eager"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=24, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=3, head_dim=4, attn_implementation=attention, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_the_target_is_the_mean_attention_of_all_queries_behind_the_window():
    ids = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        dense = stock()(ids, output_attentions=True, use_cache=False).attentions
    seen = ObservedAttention(stock(), WINDOW).read(ids)
    for (states, later), weights in zip(seen, dense, strict=True):
        weights = weights.unflatten(1, (3, 2)).mean(2)  # [B, H, queries, keys]
        assert states.shape == (2, 3, LENGTH, 8) and later.shape == (2, 3, LENGTH - WINDOW - 1)
        for token in (0, 1, 70, LENGTH - WINDOW - 2):
            expected = weights[:, :, token + WINDOW + 1 :, token].mean(-1)
            torch.testing.assert_close(later[..., token], expected, rtol=1e-4, atol=1e-6)


@pytest.fixture
def values(corpus, tmp_path):
    tokenizer = train_tokenizer([path.read_text() for path in (corpus / "train").iterdir()], 300, tmp_path / "stock")
    stock(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "stock")
    tokenizer.save_pretrained(tmp_path / "stock")
    texts = {
        name: {"text": {"_target_": "dmc.data.TextSource", "name": str(corpus / folder)}}
        for name, folder in (("train", "train"), ("validation", "held_out"))
    }
    return {
        "model": str(tmp_path / "stock"),
        "data": texts | {"cache_folder": str(tmp_path / "cache")},
        "scorer": {"window": 4, "state_size": 3, "width": 6},
        "steps": 30,
        "sequence_length": 32,
        "batch_size": 4,
        "learning_rate": 0.02,
        "output": str(tmp_path / "scorer"),
    }


def test_a_fit_finds_what_is_attended_to_later(values):
    scorer = DelayedScorer.load(fit_scorer(build_config(FitConfig, values)))
    fresh = DelayedScorer(scorer.config, 2, 3, 4)
    fresh.load_state_dict(
        {name: scorer.state_dict().get(name) if name in ("mean", "deviation") else weights for name, weights in
         fresh.state_dict().items()}
    )  # fmt: skip
    from dmc.models import load_model

    ids = torch.randint(0, 200, (3, 32), generator=torch.Generator().manual_seed(2))
    layers = ObservedAttention(load_model(values["model"]), 4).read(ids)
    found = []
    for one in (fresh, scorer):
        overlap = 0.0
        for index, (states, later) in enumerate(layers):
            begin = torch.zeros(3, 3, one.state_numbers)
            scores = one.read(index, begin, states, states.roll(4, dims=2))[0][..., 4:-1]
            overlap += float(later.gather(-1, scores.topk(8, dim=-1).indices).sum() / later.sum())
        found.append(overlap / len(layers))
    assert found[1] > found[0] + 0.03


def test_a_fit_that_diverges_writes_nothing(values, monkeypatch):
    monkeypatch.setattr("dmc.training.scorer_fit._loss", lambda scorer, *_: scorer.output.sum() * torch.nan)
    with pytest.raises(ArithmeticError, match=r"step 0: the divergence is not finite: give a smaller learning_rate"):
        fit_scorer(build_config(FitConfig, values))
    assert not Path(values["output"]).exists()


def test_a_scorer_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def cut_off(weights, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("dmc.policies.delayed_scorer.save_file", cut_off)
    with pytest.raises(OSError, match="no space left"):
        DelayedScorer(ScorerConfig(), 1, 1, 4).save(tmp_path / "scorer.safetensors")
    assert [*tmp_path.iterdir()] == []


def test_a_fit_that_cannot_be_is_refused(values, tmp_path):
    with pytest.raises(ValueError, match=r"sequence_length=32 leaves no token behind scorer\.window=28"):
        build_config(FitConfig, values | {"scorer": {"window": 28}})
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "scorer.safetensors").touch()
    with pytest.raises(ValueError, match="is there already: choose another output"):
        fit_scorer(build_config(FitConfig, values))
