"""One family of each convention on two ranks: the tokens of one process, and its gradients, whatever is divided."""

import json

import pytest
import torch
from launching import Processes
from laying import serve_and_differentiate, write_gradients
from serving import report
from tiny_families import CONVENTIONS, compressed_of, stock_of, texts

from dmc import Engine, SamplingParams
from dmc.config import build_config
from dmc.training.config import RunConfig

FAMILIES = [*CONVENTIONS, "granitemoeshared", "minimax_m2", "starcoder2"]
"""The last have modules of other names, or experts beside what is normalized together."""
UNDIVIDED = ("qwen3_next",)
"""Whose layers without attention keep a state that ranks cannot divide."""
WITH_WINDOWS = ("gemma3_text", "gpt_oss")
LAYOUTS = {
    "fsdp2": {"devices": 2, "strategy": "fsdp2"},
    "tensors": {"devices": 2, "strategy": "fsdp2", "tensor_parallel_size": 2},
    "contexts": {"devices": 2, "strategy": "ddp", "context_parallel_size": 2},
}
PARAMS = [
    SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_new_tokens=9, temperature=0.8, seed=3, n=2, ignore_eos=True),
]
GATES = {"gate_input": "both", "delay": 2, "window_size": 3, "decision_offset": 0.5, "target_ratio": 4.0}


def run_of(values, folder, control, trainer):
    changes = {
        "model": str(folder), "compression": GATES, "control": control,
        "training": values["training"] | {"stages": {"retrofit": {"length": "4 steps"}}},
        "trainer": values["trainer"] | trainer,
    }  # fmt: skip
    return build_config(RunConfig, values | changes), 2


@pytest.mark.slow
def test_two_ranks_serve_and_train_a_family_of_each_convention_as_one(run_values, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir(), together.mkdir()
    prompts, tokens = texts(30, 17), torch.tensor(texts(32, 32))
    models = {}
    for family in FAMILIES:
        stock_of(family).save_pretrained(tmp_path / family)
        if family not in UNDIVIDED:
            models |= {family: stock_of(family), f"{family} with gates": compressed_of(family, delay=3)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    kinds = [(family, control) for family in FAMILIES for control in (False, True)]
    runs = {
        f"{family} {control} {layout}": run_of(run_values, tmp_path / family, control, trainer)
        for family, control in kinds
        for layout, trainer in LAYOUTS.items()
        if (layout == "tensors" and family not in UNDIVIDED)
        or (layout == "fsdp2" and not control)
        or family in WITH_WINDOWS
    }
    served = [tmp_path / name for name in models], prompts, PARAMS, together / "served.json"
    with Processes(serve_and_differentiate, (served, (runs, tokens, together)), 2, log := tmp_path / "log") as ranks:
        whole = {f"{family} {control}": run_of(run_values, tmp_path / family, control, {}) for family, control in kinds}
        write_gradients(0, whole, tokens, alone)
        expected = {}
        for name, model in models.items():
            engine = Engine(model, max_batch_size=2)
            expected[name] = report(engine, engine.generate(prompts, PARAMS))
        assert set(ranks.join(seconds=600)) == {0}, log.read_text()[-4000:]
    found = json.loads((together / "served.json").read_text())
    for name, one in expected.items():
        torch.testing.assert_close(found[name].pop("logprobs"), one.pop("logprobs"), rtol=0, atol=1e-4)
        assert found[name] == one, name
    for name in runs:
        one, other = torch.load(alone / f"{name.rsplit(' ', 1)[0]}.pt"), torch.load(together / f"{name}.pt")
        assert one.keys() == other.keys()
        for key, value in one.items():
            atol = 1e-5 * max(1.0, float(value.abs().max()))
            torch.testing.assert_close(
                other[key], value, atol=atol, rtol=1e-4, msg=lambda difference: f"{name} {key}: {difference}"
            )
