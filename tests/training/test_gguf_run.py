"""Two ranks start at once from a GGUF file: it is imported once, and they learn what one process learns."""

import json
from functools import partial

import pytest
import torch
from launching import Ranks, use_hub_cache
from tiny_gguf import write_tiny_gguf

from dmc import load_model
from dmc.config import build_config
from dmc.training.config import RunConfig
from dmc.training.run import train

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")

GATES = {"gate_input": "hidden", "action": "drop", "delay": 2, "decision_scale": 4.0, "target_ratio": 2.0}
IDS = torch.arange(2 * 24).reshape(2, 24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "learned"),
    [("ddp", {"gates_only": True}), ("fsdp2", {"gates_only": True}), ("fsdp2", {})],
    ids=["ddp, gates", "fsdp2, gates", "fsdp2, all"],
)
def test_ranks_learn_from_a_file_what_one_process_learns(strategy, learned, run_values, tmp_path, monkeypatch):
    write_tiny_gguf(tmp_path / "tiny.Q4_1.gguf")
    run_values |= {"model": str(tmp_path / "tiny.Q4_1.gguf"), "compression": GATES}
    run_values["data"]["tokenizer"] = {"train_vocab_size": None, "folder": None}
    lengths = {"stages": {"retrofit": {"length": "3 steps"}}, "batch_size": 4, "micro_batch_size": 2}
    run_values["training"] |= {"validate_every_steps": 9, "learning_rate": 0.01, **lengths, **learned}
    two = {**run_values, "output_dir": str(tmp_path / "two")}
    two["trainer"] = run_values["trainer"] | {"devices": 2, "strategy": strategy}
    with Ranks(two, 2, tmp_path / "log", partial(use_hub_cache, folder=tmp_path / "cache")) as ranks:
        assert ranks.join() == [0, 0], (tmp_path / "log").read_text()[-4000:]
    assert (tmp_path / "log").read_text().count("4-bit weights, dequantized to bfloat16") == 1
    (imported,) = (path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir())
    use_hub_cache(0, tmp_path / "cache", monkeypatch.setattr)
    alone = train(build_config(RunConfig, {**run_values, "output_dir": str(tmp_path / "one")})).final
    found, expected = (load_model(final)(IDS, use_cache=False).logits for final in (tmp_path / "two" / "final", alone))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    assert not torch.allclose(expected, load_model(imported, dtype="float32")(IDS).logits, atol=1e-2)
    if learned:
        named = json.loads((tmp_path / "two" / "final" / "config.json").read_text())["base_model_name_or_path"]
        assert named == str(imported)
