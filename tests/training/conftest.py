"""A run small enough to train in a test: a random tiny Llama on a few made-up documents."""

import pytest
from launching import draw_nothing, write_corpus

from dmc.config import build_config
from dmc.training.callbacks.validation import Validation
from dmc.training.config import RunConfig
from dmc.training.export import Exporter

STAGES = {
    "zero_out": {"length": "2 steps"},
    "retrofit": {"length": "4 steps"},
    "solidify": {"length": "2 steps", "final_fraction": 0.0},
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run_values(corpus, tmp_path):
    """Plain values of a run; tests change them and call `build_config`."""
    return {
        "base": {
            "shape": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "tie_word_embeddings": True,
                "bos_token_id": None,
                "eos_token_id": 0,
            }
        },
        "data": {
            "train": {"text": {"_target_": "dmc.data.TextSource", "name": str(corpus / "train")}},
            "validation": {"text": {"_target_": "dmc.data.TextSource", "name": str(corpus / "held_out")}},
            "cache_folder": str(corpus / "cache"),
            "tokenizer": {"train_vocab_size": 300, "folder": str(corpus / "tokenizer")},
        },
        "training": {
            "stages": STAGES,
            "sequence_length": 32,
            "batch_size": 4,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "ratio_weight": 2.0,
            "snapshot_ratios": [],
            "calibration_sequences": 4,
            "validation_sequences": 4,
            "validate_every_steps": 4,
            "checkpoint_every_steps": 1,
            "log_every_steps": 1,
        },
        "compression": {"delay": 2, "window_size": 3, "decision_offset": 0.5, "target_ratio": 4.0},
        "trainer": {"accelerator": "cpu"},
        "output_dir": str(tmp_path / "run"),
    }


@pytest.fixture
def pictures():
    """Ask for the heat maps of runs."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Draw heat maps only for a test that asks for them."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("dmc.training.callbacks.validation.draw_heatmap", draw_nothing)


@pytest.fixture
def only_trained(monkeypatch):
    """Leave out what a run writes beside its checkpoints."""
    monkeypatch.setattr(Validation, "log_score", lambda *_: None)
    monkeypatch.setattr(Exporter, "write", lambda self, model, folder, ratio, step: folder.mkdir(parents=True))


@pytest.fixture
def run_config(run_values):
    return build_config(RunConfig, run_values)
