"""What a run takes from the model it starts from: its tokenizer, its head, its weights; and what it refuses of them."""

import json
import math
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composing import settings_of
from launching import note_positions
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dmc import load_model
from dmc.config import build_config
from dmc.config.command_line import plain_values
from dmc.data import train_tokenizer
from dmc.models.weights import refuse_nonfinite_parts
from dmc.training.callbacks.preemption import PreemptedError
from dmc.training.callbacks.teacher_check import TeacherCheck
from dmc.training.config import RunConfig, run_config
from dmc.training.run import train
from dmc.training.text_data import build_tokenizer, text_digests, weight_digests

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": 0, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture
def own_tokenizer(tmp_path):
    """Train a tokenizer of another size on another text than the run's."""
    return train_tokenizer(made_up_words(0), 320, tmp_path / "own")


def made_up_words(seed):
    letters = random.Random(seed)
    return [" ".join("".join(letters.choices("abcdefgh", k=5)) for _ in range(40)) for _ in range(5)]


@pytest.fixture
def model(own_tokenizer, tmp_path):
    return write_model(tmp_path / "model", own_tokenizer)


def write_model(folder, tokenizer, vocab_size=None, **changes):
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": vocab_size or len(tokenizer), **changes}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def values(run_values, model):
    """Settings of a short run on a pretrained model, whose data would train a tokenizer for a fresh one."""
    run_values["training"] |= {"stages": {"retrofit": {"length": "2 steps"}}, "calibrate": False}
    return run_values | {"model": str(model)}


def started(values, **changes):
    return train(build_config(RunConfig, values | changes))


def test_a_model_keeps_its_tokenizer_whatever_the_data_would_train(values, own_tokenizer):
    final = started(values).final
    assert AutoTokenizer.from_pretrained(final).get_vocab() == own_tokenizer.get_vocab()
    assert not Path(values["data"]["tokenizer"]["folder"]).with_name("other").exists()
    expected = dict(values["data"], tokenizer={})
    assert text_digests(build_config(RunConfig, values)) == text_digests(
        build_config(RunConfig, values | {"data": expected})
    )


def test_a_fresh_model_is_given_the_tokenizer_that_its_run_trains_and_its_retrofit_keeps_it(run_values, tmp_path):
    run_values["training"]["stages"] = {"pretrain": {"length": "1 steps"}}
    base = started(run_values, compression=None, output_dir=str(tmp_path / "base")).final
    run_values["training"]["stages"] = {"retrofit": {"length": "1 steps"}}
    settings = {"train_vocab_size": 290, "folder": str(tmp_path / "unused")}
    data = run_values["data"] | {"tokenizer": settings}
    final = started(run_values, model=str(base), data=data, output_dir=str(tmp_path / "retrofit")).final
    first, second = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (base, final))
    assert first == second and len(first) == load_model(final).config.vocab_size
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("data", ["stdlib", "python_code", "recall", "chains"])
def test_every_text_that_trains_a_tokenizer_leaves_that_of_a_model(data, model, own_tokenizer):
    config = run_config(plain_values(settings_of("train", f"data={data}", f"model={model}")))
    assert build_tokenizer(config).get_vocab() == own_tokenizer.get_vocab()


@pytest.mark.parametrize(
    "asked",
    [
        "data.tokenizer.train_vocab_size=512",
        "++data.tokenizer.train_vocab_size=512",
        "data.tokenizer={train_vocab_size: 512, folder: somewhere}",
    ],
)
def test_a_command_that_names_a_model_and_the_size_of_a_tokenizer_is_refused(asked, model, tmp_path):
    words = [asked, f"model={model}"]
    with pytest.raises(ValueError, match=r"train_vocab_size=512 with model=.*its 320 words: leave the size out"):
        run_config(plain_values(settings_of("train", *words)), words)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    for allowed in (
        [f"model={model}"],
        [f"model={model}", f"data.tokenizer.train_vocab_size={size}"],
        [f"model={model}", "data.tokenizer={train_vocab_size: null, folder: null}"],
        [asked],
        [asked, f"model={write_model(tmp_path / 'bare', None, 512)}"],
    ):
        run_config(plain_values(settings_of("train", *allowed)), allowed)


def test_a_model_without_a_tokenizer_is_told_that_one_is_trained(values, tmp_path, caplog):
    folder = write_model(tmp_path / "bare", None, 300)
    tokenizer = build_tokenizer(build_config(RunConfig, values | {"model": str(folder)}))
    assert len(tokenizer) <= 300
    assert f"model={folder} has no tokenizer: one of 300 tokens is trained on the text" in caplog.text


def refused(values, message, **changes):
    with pytest.raises(ValueError, match=message) as error:
        started(values, **changes)
    assert "\n" not in str(error.value)
    assert not Path(values["output_dir"]).exists()


def test_a_tokenizer_larger_than_the_model_is_refused(values, own_tokenizer, tmp_path):
    folder = write_model(tmp_path / "small", own_tokenizer, 310)
    refused(values, r"the tokenizer of model=.*small: it has token ids up to 319, the model knows only 310 tokens",
            model=str(folder))  # fmt: skip
    bare = write_model(tmp_path / "bare", None, 290)
    data = values["data"] | {"tokenizer": {"path": str(tmp_path / "model")}}
    refused(values, r"data.tokenizer.path=.*model: it has token ids up to 319", model=str(bare), data=data)
    base = {"shape": values["base"]["shape"] | {"vocab_size": 290}}
    refused(values, r"train_vocab_size=300: it has token ids up to 2\d\d, the model knows only 290 tokens: raise base",
            base=base, model=None)  # fmt: skip


def test_a_fresh_model_has_a_word_for_each_id_of_a_tokenizer_with_gaps(run_values, own_tokenizer, tmp_path):
    own_tokenizer.save_pretrained(tmp_path / "gaps")
    file = tmp_path / "gaps" / "tokenizer.json"
    content = json.loads(file.read_text())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][last] = 333
    file.write_text(json.dumps(content))
    run_values["training"]["stages"] = {"pretrain": {"length": "1 steps"}}
    data = run_values["data"] | {"tokenizer": {"path": str(tmp_path / "gaps")}}
    assert load_model(started(run_values, compression=None, data=data).final).config.vocab_size == 334


def test_a_named_tokenizer_that_numbers_words_otherwise_is_refused(values, own_tokenizer, tmp_path):
    other = train_tokenizer(made_up_words(1), 320, tmp_path / "other")
    data = values["data"] | {"tokenizer": {"path": str(tmp_path / "other")}}
    refused(values, r"data.tokenizer.path=.*other: it.*the model's own.*: leave data.tokenizer.path out", data=data)
    assert other.get_vocab() != own_tokenizer.get_vocab()
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    data = values["data"] | {"tokenizer": {"path": str(tmp_path / "copy")}}
    assert len(build_tokenizer(build_config(RunConfig, values | {"data": data}))) == 320
    bare = write_model(tmp_path / "bare", None, 320, eos_token_id=7)
    refused(values, r"config.json says eos_token_id=7, which is its .*, and its eos token has the id 0", data=data,
            model=str(bare))  # fmt: skip


def test_a_model_that_contradicts_its_own_tokenizer_is_told(values, own_tokenizer, tmp_path, caplog):
    folder = write_model(tmp_path / "odd", own_tokenizer, eos_token_id=7)
    build_tokenizer(build_config(RunConfig, values | {"model": str(folder)}))
    assert "config.json says eos_token_id=7" in caplog.text


def test_a_teacher_that_guesses_is_told_in_one_line(values, caplog):
    values["training"] |= {"distillation": {}}
    started(values)
    warned = [record.getMessage() for record in caplog.records if "look at whether" in record.getMessage()]
    assert len(warned) == 1 and f"a guess among its 320 tokens {math.log(320):.2f}" in warned[0]
    assert "\n" not in warned[0]


@pytest.mark.parametrize(
    ("loss", "step", "is_told"), [(5.18, 0, False), (5.20, 0, True), (math.nan, 0, True), (9, 3, 0)]
)
def test_a_teacher_is_told_from_nine_tenths_of_a_guess_on(loss, step, is_told, caplog, monkeypatch):
    monkeypatch.setattr("dmc.training.callbacks.teacher_check.score_text", lambda *_, **__: SimpleNamespace(loss=loss))
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=320))
    precision = SimpleNamespace(forward_context=nullcontext)
    trainer = SimpleNamespace(global_step=step, is_global_zero=True, precision_plugin=precision)
    module = SimpleNamespace(teacher=SimpleNamespace(model=model, path="teacher", gate_mode=None))
    TeacherCheck(lambda: [{}]).on_train_start(trainer, module)
    assert ("look at whether" in caplog.text) == bool(is_told)


def test_a_run_exports_the_head_that_its_base_has_beside_a_configuration_that_denies_it(values, tmp_path):
    weights = load_file(tmp_path / "model" / "model.safetensors")
    head = weights["lm_head.weight"].clone()
    assert not torch.equal(head, weights["model.embed_tokens.weight"])
    change_json(tmp_path / "model" / "config.json", tie_word_embeddings=True)
    values["training"] |= {"stages": {"retrofit": {"length": "1 steps"}}, "gates_only": True, "learning_rate": 1e-9}
    final = started(values, compression=values["compression"] | {"gate_input": "hidden"}).final
    assert torch.equal(load_model(final).lm_head.weight, head)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["base", "teacher"])
def test_weights_that_are_not_finite_are_refused_by_name(which, value, values, own_tokenizer, tmp_path):
    folder = write_model(tmp_path / "bad", own_tokenizer)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    message = r"bad: weight model.layers.1.mlp.up_proj.weight \(torch.float32\) holds nan or inf in 1 of 2048 numbers"
    if which == "base":
        refused(values, message, model=str(folder))
    else:
        training = values["training"] | {"distillation": {"path": str(folder)}}
        refused(values, message, training=training)


def test_a_rank_with_finite_parts_hears_of_another_whose_are_not():
    heard = SimpleNamespace(all_gather_object=lambda found: [found, "weight x holds nan"])
    with pytest.raises(ValueError, match="base: weight x holds nan of a rank's part"):
        refuse_nonfinite_parts([("a", torch.ones(3))], "base", heard)
    heard.all_gather_object = lambda found: [found, None]
    refuse_nonfinite_parts([("a", torch.ones(3))], "base", heard)


def test_a_sum_that_overflows_is_no_inf(own_tokenizer, tmp_path):
    folder = write_model(tmp_path / "large", own_tokenizer)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_model(folder)


@pytest.fixture
def stopped(values, tmp_path):
    """Stop a run with a base and another teacher after its first step."""
    shutil.copytree(tmp_path / "model", tmp_path / "teacher")
    values["training"] |= {"distillation": {"path": str(tmp_path / "teacher")}}
    with pytest.MonkeyPatch.context() as patch:
        note_positions(0, tmp_path / "positions", stop=(1, 1), replace=patch.setattr)
        with pytest.raises(PreemptedError, match="after step 1 of 2"):
            started(values)
    return values


@pytest.mark.parametrize(("folder", "setting"), [("model", "model"), ("teacher", "training.distillation.path")])
def test_other_weights_under_the_same_path_end_a_resume(folder, setting, stopped, tmp_path):
    path = tmp_path / folder / "model.safetensors"
    weights, times = load_file(path), path.stat()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(weights, path, {"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=rf"^{setting} has changed since the run in .* go on with other weights"):
        started(stopped)


def test_a_base_that_was_copied_or_touched_resumes(stopped, tmp_path):
    for name in ("model", "teacher"):
        shutil.move(tmp_path / name, tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", tmp_path / name)
        for path in (tmp_path / name).iterdir():
            os.utime(path, (0, 0))
        shutil.rmtree(tmp_path / "moved")
    assert started(stopped).is_finished


def test_each_tensor_of_large_weights_is_sampled(values, tmp_path, monkeypatch):
    config, path = build_config(RunConfig, values), tmp_path / "model" / "model.safetensors"
    monkeypatch.setattr("dmc.models.weights.WHOLE_BYTES", 0)
    monkeypatch.setattr("dmc.models.weights.SAMPLED_BYTES", 8)
    weights, before = load_file(path), weight_digests(config)
    for name in weights:
        flat = weights[name].view(-1)
        for place in (0, len(flat) // 2, -1):
            changed = flat.clone()
            changed[place] += 1
            save_file(weights | {name: changed.view_as(weights[name])}, path, {"format": "pt"})
            assert weight_digests(config) != before, (name, place)
    save_file(weights, path, {"format": "pt"})
    assert weight_digests(config) == before
    change_json(tmp_path / "model" / "config.json", rms_norm_eps=0.1)
    assert weight_digests(config) != before
