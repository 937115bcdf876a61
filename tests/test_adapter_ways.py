"""Every way of taking a folder of gates alone gives what the whole model gives; every way refuses another base."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from conftest import build_stock
from launching import draw_nothing, write_corpus
from safetensors.torch import load_file, save_file
from scripts_here import SCRIPTS, run_script
from transformers import AutoConfig, AutoModelForCausalLM, pipeline

from dmc import Engine, load_model
from dmc.commands.export import ExportConfig, export
from dmc.commands.generate import GenerateConfig, _load
from dmc.config import build_config
from dmc.data import train_tokenizer
from dmc.models import FAMILIES
from dmc.models.adapter_folder import with_base
from dmc.models.build import assemble
from dmc.models.loading import load_tokenizer, load_with_tokenizer
from dmc.models.tensor_parallel import _read_slices
from dmc.models.weights import read_model_config
from dmc.ranks import ALONE
from dmc.serving.config import make_worker, read_config
from dmc.training.config import RunConfig
from dmc.training.model_folder import push
from dmc.training.run import train

IDS = torch.arange(2 * 48).reshape(2, 48)
WORDS = ["house", "garden", "river", "mountain", "window", "letter", "number", "color", "paper", "stone"]
GATES = {"gate_input": "hidden", "action": "drop", "delay": 2, "decision_scale": 4.0, "target_ratio": 2.0}
FITTED = {"stages": {}, "regression_init": {"sequences": 4}}
REFUSAL = "put back that base"


@dataclass(frozen=True)
class Place:
    """A base, gates learned on it, and the whole model of both; `root` holds base and adapter."""

    root: Path
    base: Path
    adapter: Path
    whole: Path

    def copied(self, root):
        """Copy base and adapter, with their paths from `root`."""
        shutil.copytree(self.root, root)
        return Place(root, *(root / path.relative_to(self.root) for path in (self.base, self.adapter, self.whole)))


def run_values(corpus, base, output, compression=GATES, **training):
    source = {"_target_": "dmc.data.TextSource"}
    texts = {split: {"text": source | {"name": str(corpus / folder)}} for split, folder in SPLITS.items()}
    lengths = {"sequence_length": 32, "batch_size": 4, "micro_batch_size": 2, "validation_sequences": 4}
    return {
        "model": str(base),
        "data": {**texts, "cache_folder": str(corpus / "cache")},
        "training": {**lengths, "calibration_sequences": 4, "snapshot_ratios": [], **training},
        "compression": compression,
        "trainer": {"accelerator": "cpu"},
        "output_dir": str(output),
    }


SPLITS = {"train": "train", "validation": "held_out"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def place(tmp_path_factory, corpus):
    """Learn the gates by a run, which ends with the adapter."""
    root = tmp_path_factory.mktemp("place")
    base, run = root / "models" / "base", root / "outputs" / "run"
    text = " ".join(random.Random(0).choices(WORDS, k=3000))
    tokenizer = train_tokenizer([text] * 3, 340, root / "tokenizer")
    build_stock(vocab_size=340).to(torch.bfloat16).save_pretrained(base)  # as real ones are; gates are float32
    tokenizer.save_pretrained(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmc.training.callbacks.validation.draw_heatmap", draw_nothing)
        train(build_config(RunConfig, run_values(corpus, base, run, **FITTED)))
    whole = export(ExportConfig(run=str(run), output=str(root / "outputs" / "whole"), merge=True))
    return Place(root, base, run / "final", whole)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def score(folder):
    """Log-probabilities of the engine."""
    prompts, continuations = [ids[:30].tolist() for ids in IDS], [ids[30:].tolist() for ids in IDS]
    return torch.stack(Engine(load_model(folder)).score(prompts, continuations))


def load_through_server(folder):
    served = read_config({"models": {"gates": {"path": str(folder)}}, "memory": 2**24})
    (engine,) = make_worker(served, SCRIPTS.parent / "configs" / "policy").engines.values()
    return engine.model


def load_as_vllm(folder):
    """What vLLM reads, the files of the folder itself, made whole."""
    (file,) = folder.glob("*.safetensors")
    weights = with_base(load_file(file).items(), AutoConfig.from_pretrained(folder), str(folder))
    return assemble(read_model_config(folder), {name: weight.float() for name, weight in weights})


LOADERS = {
    "load_model": load_model,
    "auto": AutoModelForCausalLM.from_pretrained,
    "class": FAMILIES["llama"].from_pretrained,
    "config first": lambda folder: AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(folder)
    ),
    "compare, demo": lambda folder: load_with_tokenizer(str(folder))[0],
    "generate": lambda folder: _load(GenerateConfig(model=str(folder), prompt="x")),
    "server": load_through_server,
    "pipeline": lambda folder: pipeline("text-generation", model=str(folder)).model,
    "slices": lambda folder: assemble(read_model_config(folder), _read_slices(folder, {}, ALONE, torch.float32, "cpu")),
    "vLLM": load_as_vllm,
}
"""From a folder to a model."""


@pytest.mark.parametrize("way", LOADERS)
def test_every_way_of_loading_gives_the_logits_of_the_whole_model(way, place):
    found = LOADERS[way](place.adapter)
    assert torch.equal(logits(found), logits(load_model(place.whole)))
    assert not torch.equal(logits(found), logits(load_model(place.base)))
    assert not hasattr(found.config, "base_digest")


def test_an_engine_scores_as_the_whole_model(place):
    assert torch.equal(score(place.adapter), score(place.whole))


def generate(place, folder, scratch):
    return printed("generate.py", f"model={folder}", "prompt='river stone river window'", "max_new_tokens=12"), []


def compare(place, folder, scratch):
    """Metrics of the only cell, and their parts."""
    text = scratch / "text.txt"
    text.write_text(" ".join(random.Random(1).choices(WORDS, k=600)))
    source = f"{{_target_: dmc.data.TextSource, name: {text}}}"
    lengths = "context_tokens: 48, scored_tokens: 16, bucket_tokens: 16, num_samples: 4"
    task = f"{{name: loss, like: text_loss, source: {source}, {lengths}, cache_folder: {scratch / 'cache'}}}"
    printed(
        "compare.py", f"models={{own: {folder}}}", "policies=[full]", f"tasks=[{task}]", f"output={scratch / 'cells'}"
    )
    row = json.loads((scratch / "cells" / "cells.jsonl").read_text())
    return row["main_metric"], [row["metrics"][row["main_metric"]], *row["sample_values"], row["achieved_ratio"]]


def demo(place, folder, scratch):
    models = f"models={{control: {place.base}, retrofit: {folder}}}"
    return printed("demo.py", models, "length=128", "keys=3", "questions=2", "colors=false"), []


def serve(place, folder, scratch):
    """Text and log-probabilities, as a client gets them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = []

    def ask():
        request = {"model": "own", "prompt": "river stone river window", "max_tokens": 12, "logprobs": 3}
        request |= {"temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}"
        try:
            while True:
                with contextlib.suppress(httpx.ConnectError):
                    answers.append(httpx.post(f"{url}/v1/completions", json=request, timeout=60).json())
                    return
                if ended.is_set():
                    return
                time.sleep(0.05)
        finally:
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    ended, handlers = threading.Event(), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    client = threading.Thread(target=ask)
    client.start()
    try:
        printed("serve.py", f"model={folder}", "name=own", f"port={port}", "memory=20000000")
    finally:
        ended.set()
        client.join(60)
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    ((choice,),) = [answer["choices"] for answer in answers]
    return choice["text"], choice["logprobs"]["token_logprobs"]


COMMANDS = {"generate": generate, "compare": compare, "demo": demo, "serve": serve}
"""From a place, the folder to give it and one for files to what the command tells: text and numbers."""


def printed(script, *arguments):
    """Run a script; return what it prints. An error is raised in its one line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        error = run_script(script, *arguments)
    if error:
        raise ValueError(error)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:num_keys=57")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_of_an_adapter_what_it_tells_of_the_whole_model(command, place, tmp_path):
    found = []
    for name, folder in (("adapter", place.adapter), ("whole", place.whole), ("base", place.base)):
        (tmp_path / name).mkdir()
        found.append(
            COMMANDS[command](place, folder, tmp_path / name) if name != "base" or command != "demo" else ("", [])
        )
    (text, numbers), (expected_text, expected), (base_text, of_base) = found
    assert text == expected_text and numbers == pytest.approx(expected, rel=1e-4)
    assert text != base_text or numbers != pytest.approx(of_base, rel=1e-4)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_another_base_in_one_line(command, place, tmp_path):
    other = place.copied(tmp_path / "other")
    shutil.copytree(place.base, tmp_path / "control")
    change_base(other)
    with pytest.raises(ValueError, match=REFUSAL) as caught:
        COMMANDS[command](Place(other.root, tmp_path / "control", other.adapter, other.whole), other.adapter, tmp_path)
    assert re.fullmatch(r"error: .*", str(caught.value))


def change_base(place):
    """Put other weights under the base's name, which the adapter then names."""
    config = json.loads((place.adapter / "config.json").read_text())
    (place.adapter / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(place.base)}))
    weights = load_file(place.base / "model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] + 1}, place.base / "model.safetensors")


@pytest.mark.parametrize("where", ["moved", "a/b/moved"])
def test_an_adapter_may_move_alone(where, place, tmp_path):
    shutil.copytree(place.adapter, tmp_path / where)
    assert torch.equal(logits(load_model(tmp_path / where)), logits(load_model(place.whole)))


def test_an_adapter_may_move_along_with_its_base(place, tmp_path):
    expected, moved = logits(load_model(place.whole)), place.copied(tmp_path / "elsewhere")
    away = place.base.rename(place.base.with_name("away"))
    try:
        assert torch.equal(logits(load_model(moved.adapter)), expected)
    finally:
        away.rename(place.base)


def test_training_goes_on_from_the_models_logits(place, corpus, tmp_path, monkeypatch):
    """A step that is all but none, and no calibration, leave what was loaded."""
    monkeypatch.setattr("dmc.training.callbacks.validation.draw_heatmap", draw_nothing)
    still = {
        "stages": {"retrofit": {"length": "1 steps"}},
        "gates_only": True,
        "learning_rate": 1e-30,
        "calibrate": False,
    }
    gates = {**GATES, "decision_offset": load_model(place.adapter).compression.decision_offset}
    run = train(build_config(RunConfig, run_values(corpus, place.adapter, tmp_path / "run", gates, **still)))
    assert (run.final / "dmc_gates.safetensors").is_file()
    assert torch.equal(logits(load_model(run.final)), logits(load_model(place.whole)))


def test_gates_and_base_come_back_from_a_hub(hub, place, corpus, tmp_path, monkeypatch):
    """A run learns on a base of the hub; its folder is uploaded, and loaded where neither was before."""
    monkeypatch.setattr("dmc.training.callbacks.validation.draw_heatmap", draw_nothing)
    push(place.base, "me/base")
    final = train(build_config(RunConfig, run_values(corpus, "me/base", tmp_path / "run", **FITTED))).final
    described = json.loads((final / "config.json").read_text())
    assert (described["base_model_name_or_path"], described["base_revision"]) == ("me/base", hub.commit)
    push(final, "me/gates")
    shutil.rmtree(final)
    shutil.rmtree(tmp_path / "hub")
    expected = logits(load_model(place.whole))
    for load in (load_model, AutoModelForCausalLM.from_pretrained, lambda name: load_with_tokenizer(name)[0]):
        assert torch.equal(logits(load("me/gates")), expected)
    assert load_tokenizer("me/gates").get_vocab() == load_tokenizer(place.base).get_vocab()
    shutil.rmtree(tmp_path / "hub")
    assert generate(place, "me/gates", tmp_path) == generate(place, place.whole, tmp_path)
    shutil.rmtree(tmp_path / "hub")
    other = shutil.copytree(place.base, tmp_path / "other")
    change_base(Place(tmp_path, other, shutil.copytree(place.adapter, tmp_path / "unused"), other))
    push(other, "me/base")
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=REFUSAL) as caught:
            load("me/gates")
        assert "\n" not in str(caught.value)
